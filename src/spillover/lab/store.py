"""The folder of an experiment's results: one small JSON file per visit, written atomically.

    experiment.json        the resolved experiment
    sessions.json          when and where it was run: one entry for every start of `spill lab run`
    arms/ARM.json          ready, skipped or failed, and why
    visits/KEY.json        metrics and faults of a visit; its existence marks the visit as done
    runs/KEY.json.gz       all events of the visit
    monitors/KEY.parquet   samples of monitors during the visit
    evals/ARM.json         accuracy of an arm, if the experiment measures it
    logs/                  of the servers
    analysis.json          verdicts

Completed visits are not repeated: running the same experiment into a folder resumes it. Raw files are written before
the visit that refers to them, so that an interruption leaves no incomplete visit.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from spillover.bench.records import Run
from spillover.errors import SpilloverError
from spillover.lab.experiment import LAYOUT, Experiment, file_part
from spillover.lab.schedule import Visit

# Fields that may change when an experiment is resumed. Limits may: a verdict is valid at whichever block it stops.
LIMITS = ("max_blocks", "time_limit")
INCIDENTAL = ("about", "document", "provenance", *LIMITS)


class ResultFolder:
    """A folder of results, written while an experiment runs."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self.path = path
        self.experiment = experiment

    @classmethod
    def open(cls, path: Path, experiment: Experiment) -> ResultFolder:
        """Return a new folder, or one in which the same experiment has begun."""
        folder = cls(path, experiment)
        described = path / "experiment.json"
        requested = json.loads(json.dumps(_plain(experiment.to_json())))
        begun = any((path / "visits").glob("*.json"))
        if described.exists() and begun:
            differs = difference(read_json(described), requested)
            if differs is not None:
                raise SpilloverError(
                    f"{path} holds results of another '{experiment.name}': {differs}. What decides a verdict is fixed "
                    "before the first run; give another folder with --out, or --fresh for a new one beside it")
            write_json(described, {**read_json(described), **{key: requested[key] for key in LIMITS}})
        elif path.exists() and any(path.iterdir()) and not described.exists():
            raise SpilloverError(f"{path} is not empty and holds no experiment; give another folder with --out")
        else:
            write_json(described, requested)
        return folder

    def begin(self, session: Mapping[str, Any]) -> None:
        """Begin a session. `session`: the command, code, versions and machine of this start."""
        path = self.path / "sessions.json"
        sessions = read_json(path) if path.exists() else []
        write_json(path, [*sessions, dict(session)])
        if not sessions:
            write_json(self.path / "experiment.json", {**read_json(self.path / "experiment.json"),
                                                       "provenance": dict(session)})

    def end(self, stopped: str | None) -> None:
        """Record why this session stopped; None if all blocks were run."""
        path = self.path / "sessions.json"
        *before, last = read_json(path)
        write_json(path, [*before, {**last, "stopped": stopped}])

    def done(self, visit: Visit) -> bool:
        return (self.path / "visits" / f"{visit.key}.json").exists()

    def visit(self, visit: Visit) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.path / "visits" / f"{visit.key}.json")
        return found

    def write_arm(self, name: str, record: Mapping[str, Any]) -> None:
        write_json(self.path / "arms" / f"{file_part(name)}.json", {"name": name, **record})

    def evaluated(self, name: str) -> Any:
        """Return an arm's accuracy; None if it has not been evaluated."""
        path = self.path / "evals" / f"{file_part(name)}.json"
        return read_json(path) if path.exists() else None

    def write_eval(self, name: str, record: Mapping[str, Any]) -> None:
        write_json(self.path / "evals" / f"{file_part(name)}.json", {"name": name, **record})

    def unskip(self, name: str) -> None:
        """Remove a skip: the missing engine is available now."""
        path = self.path / "arms" / f"{file_part(name)}.json"
        if path.exists() and read_json(path).get("status") == "skipped":
            path.unlink()

    def write_visit(self, visit: Visit, record: Mapping[str, Any], run: Run | None = None) -> None:
        raw = None
        if run is not None:
            raw = f"runs/{visit.key}.json.gz"
            # No time stamp inside, so that the same run gives the same bytes.
            write_bytes(self.path / raw, gzip.compress(msgspec.json.encode(run.to_json()), compresslevel=6, mtime=0))
        write_json(self.path / "visits" / f"{visit.key}.json", {
            "key": visit.key, "index": visit.index, "pass": visit.pass_, "block": visit.block,
            "workload": visit.workload, "arm": visit.arm, **record, "run": raw})

    def write_analysis(self, analysis: Mapping[str, Any]) -> None:
        write_json(self.path / "analysis.json", analysis)

    def log_folder(self, turn: str) -> Path:
        folder = self.path / "logs" / turn
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def monitor_file(self, visit: Visit) -> Path:
        folder = self.path / "monitors"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{visit.key}.parquet"


@dataclass(frozen=True)
class Results:
    """The current contents of a result folder, finished or not. Fields are plain JSON values."""

    path: Path
    experiment: Mapping[str, Any]
    sessions: tuple[Mapping[str, Any], ...]
    arms: Mapping[str, Mapping[str, Any]]
    visits: tuple[Mapping[str, Any], ...]  # in the order of running
    evals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # accuracy by arm

    @classmethod
    def open(cls, path: Path) -> Results:
        described = path / "experiment.json"
        if not described.is_file():
            raise SpilloverError(f"{path} holds no results of an experiment; run one with: spill lab run NAME")
        experiment = read_json(described)
        if experiment.get("layout") != LAYOUT:
            raise SpilloverError(f"{path} was written in layout {experiment.get('layout')}, and this version reads "
                                 f"{LAYOUT}; run the experiment again")
        sessions = path / "sessions.json"
        arms = [read_json(file) for file in sorted((path / "arms").glob("*.json"))]
        visits = [read_json(file) for file in (path / "visits").glob("*.json")]
        return cls(path, experiment, tuple(read_json(sessions) if sessions.exists() else ()),
                   {arm["name"]: arm for arm in arms}, tuple(sorted(visits, key=lambda visit: visit["index"])),
                   {each["name"]: each for each in map(read_json, sorted((path / "evals").glob("*.json")))})

    def run(self, visit: Mapping[str, Any]) -> Run | None:
        """Return all events of a visit; None if it failed before any."""
        if visit.get("run") is None:
            return None
        path = self.path / visit["run"]
        try:
            return Run.from_json(msgspec.json.decode(gzip.decompress(path.read_bytes())))
        except EOFError as error:  # must not propagate: commands treat it as Ctrl-C
            raise SpilloverError(f"{path} cannot be read: it ends too early") from error
        except (OSError, zlib.error, msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
            raise SpilloverError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpilloverError(f"{path} cannot be read: {error}") from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(_plain(value), indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, even if the machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent: NaN becomes null, infinity the string 'inf'."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if hasattr(value, "item"):  # a numpy scalar
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return str(value)


def difference(stored: Mapping[str, Any], requested: Mapping[str, Any]) -> str | None:
    """Describe the first difference of two experiments; None if they are the same but for descriptions."""
    for key in {**requested, **stored}:
        if key not in INCIDENTAL and _without_about(stored.get(key)) != _without_about(requested.get(key)):
            old, new = (json.dumps(side.get(key)) for side in (stored, requested))
            return f"its '{key}' was {_short(old)} and is now {_short(new)}"
    return None


def _without_about(value: Any) -> Any:
    """Return a copy without the descriptions of arms and workloads, which may be reworded."""
    if isinstance(value, Mapping):
        return {key: _without_about(each) for key, each in value.items() if key != "about"}
    return [_without_about(each) for each in value] if isinstance(value, list | tuple) else value


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
