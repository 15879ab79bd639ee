"""What a week runs, made ready: experiments for the lab by size and engine, command lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from spillover.course.week import CommandStep, ExperimentStep, Week, all_weeks
from spillover.errors import SpilloverError
from spillover.lab.document import read_document, scaled
from spillover.lab.engines import missing
from spillover.lab.experiment import Experiment, parse_experiment

PRESETS = {("vllm", "cpu"): "vllm-cpu", ("vllm", "gpu"): "vllm-default", ("sglang", "gpu"): "sglang-default",
           ("sglang", "cpu"): "sglang-default"}


def make_experiment(week: Week, step: ExperimentStep, scale: str, engine: str = "spillover", model: str | None = None,
                    flags: Mapping[str, Any] | None = None) -> Experiment:
    """Make the experiment of a step. `flags`: laid over those of every arm that the lab starts."""
    document = read_document(step.source)
    document = scaled(document, scale if scale in (document.get("scales") or {}) else None)
    document = _over(document, step.changes.get(scale, {}))
    for arm, own in step.engines.get(engine, {}).items():
        if arm not in document["arms"]:
            continue  # an arm of another size
        of_arm = {key: value for key, value in document["arms"][arm].items() if key not in ("engine", "preset")}
        args = {**(of_arm.get("args") or {}), **own}
        document["arms"] = {**document["arms"], arm: {
            **of_arm, "preset": PRESETS[engine, scale], "about": f"{of_arm.get('about', arm)} ({engine})",
            "args": {key: value for key, value in args.items() if value is not None}}}
    if flags:
        document["arms"] = {name: arm if "url" in arm else {**arm, "args": {**(arm.get("args") or {}), **flags}}
                            for name, arm in document["arms"].items()}
    document = _placed(document, week)
    return parse_experiment({**document, "name": f"{week.name}-{step.name}"}, scale, model)


def experiments(week: Week, scale: str, engine: str = "spillover", model: str | None = None,
                flags: Mapping[str, Any] | None = None) -> dict[str, Experiment]:
    """Make the experiments of a week, by name; refuse an engine that it has nothing for or that is not here."""
    if engine not in week.engines:
        others = [str(other.number) for other in all_weeks() if engine in other.engines]
        raise SpilloverError(f"week {week.number} has nothing to run on {engine}; weeks that have: {', '.join(others)}")
    steps = [step for step in week.experiments if scale in step.scales and (engine == "spillover"
                                                                            or engine in step.engines)]
    made = {step.name: make_experiment(week, step, scale, engine, model, flags) for step in steps}
    specs = [arm.spec for each in made.values() for arm in each.arms if arm.spec.kind == engine]
    absent = [missing(spec) for spec in specs] if engine != "spillover" else []
    if absent and all(why is not None for why in absent):
        assert absent[0] is not None
        raise SpilloverError(f"week {week.number} cannot be run on {engine}: {absent[0].reason}; to have it: "
                             f"{absent[0].install}")
    return made


def commands(week: Week, scale: str, engine: str = "spillover") -> list[CommandStep]:
    """Return the commands of a week at a size; they are of this engine only."""
    return [step for step in week.commands if scale in step.run and engine == "spillover"]


def arguments(step: CommandStep, scale: str, output: str, model: str | None = None,
              flags: Mapping[str, Any] | None = None) -> list[str]:
    """Return what follows `spill`."""
    given = shlex.split(step.run[scale])
    given += [] if model is None else ["--model", model]
    given += [part for key, value in (flags or {}).items() for part in (f"--{key}", str(value))]
    return [*given, "--output-json", output]


def most_seconds(week: Week, scale: str, engine: str = "spillover") -> float:
    """Return the longest that a week may take by its limits, starts of servers not counted."""
    return (sum(each.time_limit for each in (make_experiment(week, step, scale) for step in week.experiments
                                             if scale in step.scales))
            + sum(step.seconds for step in commands(week, scale, engine)))


def _placed(value: Any, week: Week) -> Any:
    """Return a document with WEEK/, where a path begins with it, as the folder of the week."""
    if isinstance(value, dict):
        return {key: _placed(item, week) for key, item in value.items()}
    return f"{week.folder}/{value[5:]}" if isinstance(value, str) and value.startswith("WEEK/") else value


def _over(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with changes merged over it, as the lab merges a size: null removes a value."""
    return scaled({**document, "scales": {"changed": changes}}, "changed") if changes else document
