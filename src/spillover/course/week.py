"""A week as it is written: `week.yaml` and `page.md`, parsed once and strictly.

    title: Prefix caching
    phase: Memory
    gpus: 1
    experiments:
      prefix: {lab: seed-003-week5, cpu: {time-limit: 4min}, engines: {vllm: {cache-on: {enable-prefix-caching: true}}}}
    commands:
      latency: {run: bench latency --batch-size 1, limit: 2min}
    metrics:
      - {name: Cache hit rate, about: Blocks reused, unit: "%", values: [{of: prefix, metric: hit_rate}]}
    expect:
      - says: A shared prefix of 512 tokens is found by the cache.
        left: {of: prefix, metric: median_ttft_ms, arm: cache-off}
        right: {of: prefix, metric: median_ttft_ms, arm: cache-on}
        at-least: 1.5
    plots: [Cache hit rate]
    questions: [...]
    next: [...]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.document import parse_document
from spillover.units import parse_seconds

WEEKS = 16
SCALES = ("cpu", "gpu")
ENGINES = ("spillover", "vllm", "sglang")
KINDS = ("metric", "fact", "score", "monitor", "key")
COMMAND_SECONDS = 300.0


@dataclass(frozen=True)
class Value:
    """Numbers of a run: of an experiment, one kind of number for arms on workloads; of a command, from its results."""

    of: str  # name of the experiment or command in this week
    kind: str  # one of KINDS
    names: tuple[str, ...]  # names of the metric, fact, score, monitor or keys; several are added up
    label: str = ""
    arms: tuple[str, ...] = ()  # names of arms; empty for all
    workloads: tuple[str, ...] = ()  # names of workloads; empty for all; a sweep's name stands for its points
    over: str = ""  # name of the same kind to divide by; "" for none
    factor: float = 1.0
    each: str = ""  # of a command: the key that distinguishes its results
    where: Mapping[str, Any] = field(default_factory=dict)  # of a command: required values of result keys


@dataclass(frozen=True)
class Row:
    """A row of the week's table of metrics. `absent`: why there is no number, by scale."""

    name: str
    about: str
    unit: str
    values: tuple[Value, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expectation:
    """An expected shape: left / right (left without `right`) is at least `at_least`, or within `within` of 1."""

    says: str
    left: Value
    right: Value | None = None
    at_least: float | None = None
    within: float | None = None
    why: str = ""
    scales: tuple[str, ...] = SCALES


@dataclass(frozen=True)
class ExperimentStep:
    """An experiment of the lab, shipped with it or a file of the week, with changes per size and engine."""

    name: str
    source: str  # a name of `spill lab list`, or a path
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by scale, merged over the document
    # Flags by engine and arm; the key `load` among them has workload changes by scale.
    engines: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    scales: tuple[str, ...] = SCALES


@dataclass(frozen=True)
class CommandStep:
    """A command of `spill` that writes its measurements with --output-json."""

    name: str
    run: Mapping[str, str]  # the command line by scale
    seconds: float = COMMAND_SECONDS


@dataclass(frozen=True)
class Week:
    number: int
    folder: Path
    title: str
    phase: str
    experiments: tuple[ExperimentStep, ...]
    commands: tuple[CommandStep, ...]
    metrics: tuple[Row, ...]
    expect: tuple[Expectation, ...]
    questions: tuple[str, ...]
    next: tuple[str, ...]
    plots: tuple[str, ...] = ()
    gpus: int = 1  # number of GPUs in a job file
    missing: str = ""  # features that the document needs and this build does not have

    @property
    def name(self) -> str:
        return f"week{self.number:02}"

    @property
    def page(self) -> str:
        return (self.folder / "page.md").read_text(encoding="utf-8")

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engines that the week can be run on, spillover first."""
        return tuple(engine for engine in ENGINES
                     if engine == "spillover" or any(engine in step.engines for step in self.experiments))

    def row(self, name: str) -> Row:
        return next(row for row in self.metrics if row.name == name)


def load_week(number: int) -> Week:
    folder = course_folder() / f"week{number:02}"
    if not (folder / "week.yaml").is_file():
        raise SpilloverError(f"There is no week {number}; the course has weeks 1 to {WEEKS}")
    document = parse_document((folder / "week.yaml").read_text(encoding="utf-8"), f"week {number}")
    return parse_week(document, number, folder)


def all_weeks() -> list[Week]:
    found = sorted(course_folder().glob("week*/week.yaml"))
    return [load_week(int(path.parent.name.removeprefix("week"))) for path in found]


def course_folder() -> Path:
    """Return the folder that contains the weeks."""
    return Path(str(resources.files("spillover.course")))


def parse_week(document: Mapping[str, Any], number: int, folder: Path) -> Week:
    """Parse a week; refuse unknown names, and values of steps that do not exist."""
    where = f"week {number}"
    _names(where, document, ("title", "phase", "gpus", "missing", "experiments", "commands", "metrics", "expect",
                             "plots", "questions", "next"),
           ("title", "phase", "metrics", "expect", "questions", "next"))
    experiments = tuple(_experiment(where, str(name), given, folder)
                        for name, given in (document.get("experiments") or {}).items())
    commands = tuple(_command(where, str(name), given) for name, given in (document.get("commands") or {}).items())
    kinds = {step.name: "experiment" for step in experiments} | {step.name: "command" for step in commands}
    if len(kinds) < len(experiments) + len(commands):
        raise SpilloverError(f"{where}: an experiment and a command have the same name")
    week = Week(
        number=number, folder=folder, title=str(document["title"]), phase=str(document["phase"]),
        experiments=experiments, commands=commands,
        metrics=tuple(_row(where, given, kinds) for given in document["metrics"]),
        expect=tuple(_expectation(where, given, kinds) for given in document["expect"]),
        questions=tuple(map(str, document["questions"])), next=tuple(map(str, document["next"])),
        plots=tuple(map(str, document.get("plots") or ())), gpus=int(document.get("gpus", 1)),
        missing=str(document.get("missing", "")).strip())
    rows = [row.name for row in week.metrics]
    for plot in week.plots:
        if plot not in rows:
            raise SpilloverError(f"{where}: plots has '{plot}'{did_you_mean(plot, rows, listed=True)}")
    return week


def _experiment(where: str, name: str, given: Mapping[str, Any], folder: Path) -> ExperimentStep:
    where = f"{where}, experiment '{name}'"
    _names(where, given, ("lab", "file", "engines", "scales", *SCALES))
    if ("lab" in given) == ("file" in given):
        raise SpilloverError(f"{where} needs either 'lab', a name of spill lab list, or 'file', a YAML file of its own")
    engines = given.get("engines") or {}
    _names(f"{where}, engines", engines, ENGINES[1:])
    return ExperimentStep(name, str(given["lab"]) if "lab" in given else str(folder / str(given["file"])),
                          {scale: given[scale] for scale in SCALES if given.get(scale)}, engines,
                          _scales(where, given))


def _command(where: str, name: str, given: Mapping[str, Any]) -> CommandStep:
    where = f"{where}, command '{name}'"
    _names(where, given, ("run", "gpu", "limit", "scales"), ("run",))
    scales = _scales(where, given)
    run = {scale: str(given.get(scale, given["run"])) for scale in scales}
    return CommandStep(name, run, parse_seconds(str(given["limit"])) if "limit" in given else COMMAND_SECONDS)


def _row(where: str, given: Mapping[str, Any], kinds: Mapping[str, str]) -> Row:
    where = f"{where}, metric '{given.get('name')}'"
    _names(where, given, ("name", "about", "unit", "values", "absent"), ("name", "about", "unit"))
    absent = given.get("absent") or {}
    _names(f"{where}, absent", absent, SCALES)
    if not given.get("values") and set(absent) != set(SCALES):
        raise SpilloverError(f"{where} has no values, and 'absent' does not say why for every size")
    return Row(str(given["name"]), str(given["about"]), str(given["unit"]),
               tuple(_value(where, value, kinds) for value in given.get("values") or ()), dict(absent))


def _expectation(where: str, given: Mapping[str, Any], kinds: Mapping[str, str]) -> Expectation:
    where = f"{where}, expect '{given.get('says')}'"
    _names(where, given, ("says", "why", "left", "right", "at-least", "within", "scales"), ("says", "left"))
    if ("at-least" in given) == ("within" in given):
        raise SpilloverError(f"{where} needs either at-least, a ratio, or within, a share such as 0.1")
    return Expectation(
        str(given["says"]), _value(where, given["left"], kinds),
        _value(where, given["right"], kinds) if "right" in given else None,
        float(given["at-least"]) if "at-least" in given else None,
        float(given["within"]) if "within" in given else None, str(given.get("why", "")), _scales(where, given))


def _value(where: str, given: Mapping[str, Any], kinds: Mapping[str, str]) -> Value:
    _names(where, given, ("of", "label", "arm", "workload", "over", "factor", "each", "where", *KINDS), ("of",))
    step = str(given["of"])
    if step not in kinds:
        raise SpilloverError(f"{where}: there is no '{step}' in this week{did_you_mean(step, kinds, listed=True)}")
    kind = [kind for kind in KINDS if kind in given]
    if len(kind) != 1 or (kind[0] == "key") != (kinds[step] == "command"):
        raise SpilloverError(f"{where}: a value of an experiment is one of {', '.join(KINDS[:-1])}, of a command a key")
    return Value(step, kind[0], _list(given[kind[0]]), str(given.get("label", "")), _list(given.get("arm")),
                 _list(given.get("workload")), str(given.get("over", "")), float(given.get("factor", 1.0)),
                 str(given.get("each", "")), dict(given.get("where") or {}))


def _list(given: Any) -> tuple[str, ...]:
    return () if given is None else tuple(map(str, given)) if isinstance(given, list) else (str(given),)


def _scales(where: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    scales = _list(given.get("scales")) or SCALES
    for scale in scales:
        if scale not in SCALES:
            raise SpilloverError(f"{where}: there is no size '{scale}'; there are {', '.join(SCALES)}")
    return scales


def _names(where: str, given: Any, known: Iterable[str], needed: Iterable[str] = ()) -> None:
    if not isinstance(given, Mapping):
        raise SpilloverError(f"{where} must hold names and values; got {given!r}")
    for key in given:
        if key not in known:
            raise SpilloverError(f"{where}: there is no '{key}'{did_you_mean(str(key), known, listed=True)}")
    for key in needed:
        if given.get(key) in (None, "", []):
            raise SpilloverError(f"{where} needs '{key}'")
