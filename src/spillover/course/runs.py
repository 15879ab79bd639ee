"""The folders of a week's results, and which run was the last.

    course-results/week05-cpu/run.json         size, engine, time, and the outcome of every step
    course-results/week05-cpu/EXPERIMENT/      the lab's folder, with its own report
    course-results/week05-cpu/COMMAND.json     the measurements of a command
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spillover.course.week import SCALES, Week
from spillover.lab.analysis import analyse, analysis_of
from spillover.lab.store import Results, read_json, write_json

RESULTS = "course-results"


@dataclass(frozen=True)
class CourseRun:
    """A run of a week at one size on one engine, finished or not."""

    folder: Path
    week: Week
    scale: str = "cpu"
    engine: str = "spillover"

    @classmethod
    def of(cls, results: Path, week: Week, scale: str, engine: str) -> CourseRun:
        end = "" if engine == "spillover" else f"-{engine}"
        return cls(results / f"{week.name}-{scale}{end}", week, scale, engine)

    def experiment_folder(self, name: str) -> Path:
        return self.folder / name

    def command_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def note(self, step: str | None = None, **values: Any) -> None:
        """Save the outcome of a step, or facts about the run."""
        before = self.saved
        steps = before.get("steps") or {}
        if step is not None:
            steps, values = {**steps, step: {**steps.get(step, {}), **values}}, {}
        write_json(self.folder / "run.json", {**before, "week": self.week.number, "scale": self.scale,
                                              "engine": self.engine, "updated": time.time(), **values, "steps": steps})

    @property
    def saved(self) -> Mapping[str, Any]:
        path = self.folder / "run.json"
        found: Mapping[str, Any] = read_json(path) if path.exists() else {}
        return found

    def done(self, step: str) -> bool:
        return bool(((self.saved.get("steps") or {}).get(step) or {}).get("done"))

    @property
    def seconds(self) -> float:
        """Return the time its steps took in seconds, summed over repeated runs."""
        return sum(self.step_seconds(step) for step in self.saved.get("steps") or {})

    def step_seconds(self, step: str) -> float:
        return float(((self.saved.get("steps") or {}).get(step) or {}).get("seconds") or 0.0)

    def reason(self, step: str) -> str:
        """Return why a step has no results."""
        found = (self.saved.get("steps") or {}).get(step) or {}
        return str(found.get("reason") or f"{step} was not run")

    @cached_property
    def opened(self) -> dict[str, tuple[Results, Mapping[str, Any]]]:
        """Return results and analysis of every experiment that has begun."""
        found = {}
        for step in self.week.experiments:
            if (self.experiment_folder(step.name) / "experiment.json").is_file():
                results = Results.open(self.experiment_folder(step.name))
                analysis = analysis_of(results)
                if analysis["visits_done"] < len(results.visits):  # it has continued since the analysis was written
                    analysis = analyse(results)
                found[step.name] = results, analysis
        return found

    @cached_property
    def measured(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the results in the JSON of every command that has been run."""
        return {step.name: list(read_json(self.command_file(step.name)).get("results") or ())
                for step in self.week.commands if self.command_file(step.name).is_file()}


def runs_of(results: Path, week: Week) -> list[CourseRun]:
    """Return the runs of a week, the last one first."""
    found = [CourseRun.of(results, week, scale, engine) for scale in SCALES for engine in week.engines]
    begun = [run for run in found if (run.folder / "run.json").is_file()]
    return sorted(begun, key=lambda run: float(run.saved.get("updated") or 0), reverse=True)
