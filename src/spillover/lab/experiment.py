"""An experiment: its arms and workloads, the number of runs, and the rule of its verdict. Parsed once, immutable.

    name: tiers
    baseline: off
    arms:
      off: {engine: spillover, args: {num-gpu-blocks-override: 96}}
      host: {preset: spillover-host, args: {num-gpu-blocks-override: 96}}
    workloads:
      chats: {dataset-name: multi-turn, max-concurrency: 4}
      load: {dataset-name: random, sweep: {request-rate: [1, 2, 4]}}
    primary: output_throughput

Everything that decides a verdict (metric, confidence, what counts as the same) is fixed here before the first run. The
length of the experiment is not: a verdict may be computed after every block (`verdict`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from spillover.bench.serving.openai_api import SAMPLING
from spillover.bench.workloads.workload_options import truth
from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.accuracy import EvalSpec
from spillover.lab.document import read_document, scaled
from spillover.lab.engines import KINDS, EngineSpec
from spillover.lab.run_metrics import metric_names
from spillover.lab.validity import Gates
from spillover.lab.verdict import Rule
from spillover.units import parse_seconds

LAYOUT = 2  # version of the result folder's layout
MAX_BLOCKS = 80  # with 2.5% spread of block ratios: 5% is found in 9, "same within 2%" in 38 on average, 99% by 80
TIME_LIMIT = 3600.0  # seconds
MINIMUM_BLOCKS = 3
CONFIDENCE = 0.99
EQUIVALENCE = 0.02
URL_READY_SECONDS = 30.0  # seconds to wait for a server that should already be running
ORDERS = {"abba": 2, "alternate": 1}  # number of passes per block
RESTARTS = ("per-visit", "never")
WINDOWS = ("whole", "steady")

# Flags that keep KV below the device: where arms differ in one, a working set that fits the device tests nothing.
OFFLOAD_FLAGS = frozenset({"host-memory", "host-pool", "disk", "remote", "kv-offloading-size", "kv-transfer-config",
                           "swap-space", "enable-hierarchical-cache", "enable-lmcache"})

# Options of `spill bench serve` that define how requests are sent; all others belong to the workload.
LOAD_OPTIONS = frozenset({"request-rate", "burstiness", "max-concurrency", "static-batch-size", "ramp-up-strategy",
                          "ramp-up-start-rps", "ramp-up-end-rps", "self-timed", "max-seconds", "backend", "endpoint",
                          "extra-body", "ignore-eos", "return-token-ids", "client-processes", "request-timeout",
                          *(name.replace("_", "-") for name in SAMPLING)})

Value = TypeVar("Value")


@dataclass(frozen=True)
class Arm:
    name: str
    spec: EngineSpec
    about: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)  # how requests are sent; overrides the options of workloads

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "about": self.about, "label": self.label, "spec": self.spec.to_json(),
                **({"load": dict(self.load)} if self.load else {})}

    @property
    def label(self) -> str:
        """Return why the arm's numbers are not those of a real model; "" if they are."""
        return {"dummy": "random weights", "null": "no model: nothing is computed"}.get(
            str(self.spec.args.get("load-format")), "")


@dataclass(frozen=True)
class WorkloadSpec:
    """One workload of an experiment. `options` are those of `spill bench serve`, by their names with hyphens."""

    name: str
    options: Mapping[str, Any]
    group: str = ""  # name of the sweep that it is a point of
    sweep: Mapping[str, Any] = field(default_factory=dict)  # option values of this point of a sweep
    about: str = ""
    offload: bool = False  # whether its working set must exceed the device

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "group": self.group, "about": self.about, "sweep": dict(self.sweep),
                "options": dict(self.options), "offload": self.offload}


@dataclass(frozen=True)
class Experiment:
    name: str
    arms: tuple[Arm, ...]
    workloads: tuple[WorkloadSpec, ...]
    baseline: str
    primary: str = "output_throughput"
    secondary: tuple[str, ...] = ("median_ttft_ms", "median_tpot_ms")
    about: str = ""
    seed: str | None = None
    scale: str = "cpu"
    max_blocks: int = MAX_BLOCKS
    time_limit: float = TIME_LIMIT  # seconds; no block is started that would probably exceed it
    order: str = "abba"
    restart: str = "per-visit"
    window: str = "whole"
    warmups: int = 4
    retries: int = 1  # number of times to repeat a run that was disturbed by other load on the machine
    confidence: float = CONFIDENCE
    minimum_blocks: int = MINIMUM_BLOCKS
    equivalence: float = EQUIVALENCE  # the largest difference that counts as the same; 0 for none
    slo: Mapping[str, float] = field(default_factory=dict)  # objectives in ms by latency
    gates: Gates = field(default_factory=Gates)
    eval: EvalSpec | None = None  # how to measure the accuracy of every arm; None for not at all
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the compared metrics, the deciding one first."""
        return (self.primary, *self.secondary)

    @property
    def passes_per_block(self) -> int:
        return ORDERS[self.order]

    @property
    def passes(self) -> int:
        """Return the maximum number of passes."""
        return self.max_blocks * self.passes_per_block

    @property
    def rule(self) -> Rule:
        return Rule(self.confidence, self.minimum_blocks, self.equivalence)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def workload(self, name: str, arm: str | None = None) -> WorkloadSpec:
        """Return a workload; with `arm`, as it is sent to that arm."""
        found = next(workload for workload in self.workloads if workload.name == name)
        return found if arm is None else replace(found, options={**found.options, **self.arm(arm).load})

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": LAYOUT, "name": self.name, "about": self.about, "seed": self.seed, "scale": self.scale,
            "baseline": self.baseline, "primary": self.primary, "metrics": list(self.metrics),
            "max_blocks": self.max_blocks, "time_limit": self.time_limit, "order": self.order, "restart": self.restart,
            "window": self.window, "warmups": self.warmups, "retries": self.retries, "confidence": self.confidence,
            "minimum_blocks": self.minimum_blocks, "equivalence": self.equivalence,
            "slo": dict(self.slo), "gates": self.gates.to_json(),
            "arms": [arm.to_json() for arm in self.arms],
            "workloads": [workload.to_json() for workload in self.workloads],
            **({} if self.eval is None else {"eval": self.eval.to_json()}),
            "document": dict(self.document),
        }


def load_experiment(name: str, scale: str | None = None, model: str | None = None, max_blocks: int | None = None,
                    arms: Iterable[str] = (), workloads: Iterable[str] = (),
                    time_limit: float | None = None) -> Experiment:
    """Load an experiment by path, or a shipped one by name. `arms`, `workloads`: only these, and the baseline."""
    document = read_document(name)
    experiment = parse_experiment(scaled(document, scale), scale or "cpu", model)
    experiment = replace(experiment, max_blocks=max_blocks or experiment.max_blocks,
                         time_limit=time_limit or experiment.time_limit)
    return _only(experiment, list(arms), list(workloads))


def parse_experiment(document: Mapping[str, Any], scale: str = "cpu", model: str | None = None) -> Experiment:
    """Parse an experiment; refuse unknown names, which may be misspelt settings."""
    where = f"experiment '{document.get('name', '')}'"
    if "repeats" in document:
        raise SpilloverError(f"{where}: there is no 'repeats': an experiment runs until it is decided. Give max-blocks "
                             "or time-limit to end it earlier")
    _check_names(where, document, {"name", "about", "seed", "model", "baseline", "arms", "workloads", "max-blocks",
                                   "time-limit", "order", "restart", "window", "warmups", "retries", "primary",
                                   "metrics", "confidence", "minimum-blocks", "equivalence", "slo", "gates", "eval",
                                   "scales"})
    name = _string(where, document, "name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpilloverError(f"name: '{name}' becomes a folder's name; use letters, digits, '.', '_' and '-'")
    model = model if model is not None else _text(where, document, "model")
    arms = tuple(_arm(where, str(key), value, model) for key, value in _section(where, document, "arms").items())
    baseline = str(document.get("baseline", arms[0].name))
    _one_of(f"{where}: baseline", baseline, [arm.name for arm in arms])
    offload = _offload_differs(arms)
    workloads = tuple(point for key, value in _section(where, document, "workloads").items()
                      for point in _points(where, str(key), value, offload))
    _unique_files(where, arms, workloads)
    metrics = document.get("metrics") or Experiment.secondary
    if not isinstance(metrics, list | tuple) or not all(isinstance(metric, str) for metric in metrics):
        raise SpilloverError(f"{where}: metrics must be a list of names, such as [mean_ttft_ms]; got {metrics!r}")
    primary = str(document.get("primary", Experiment.primary))
    experiment = Experiment(
        name=name, arms=arms, workloads=workloads, baseline=baseline, primary=primary,
        secondary=tuple(dict.fromkeys(metric for metric in metrics if metric != primary)),
        about=str(document.get("about") or "").strip(),
        seed=None if document.get("seed") is None else str(document["seed"]), scale=scale,
        max_blocks=_number(where, document, "max-blocks", int, MAX_BLOCKS),
        time_limit=_seconds(where, document, "time-limit", TIME_LIMIT),
        order=_one_of(f"{where}: order", str(document.get("order", "abba")), ORDERS),
        restart=_one_of(f"{where}: restart", str(document.get("restart", RESTARTS[0])), RESTARTS),
        window=_one_of(f"{where}: window", str(document.get("window", WINDOWS[0])), WINDOWS),
        warmups=_number(where, document, "warmups", int, 4), retries=_number(where, document, "retries", int, 1),
        confidence=_number(where, document, "confidence", float, CONFIDENCE),
        minimum_blocks=_number(where, document, "minimum-blocks", int, MINIMUM_BLOCKS),
        equivalence=_share(where, document, "equivalence", EQUIVALENCE),
        slo=_slo(where, _mapping(where, document, "slo")),
        gates=Gates.parse(_mapping(where, document, "gates"), where),
        eval=_eval(where, _mapping(where, document, "eval")),
        document=document,
    )
    names = metric_names(experiment.slo)
    for metric in experiment.metrics:
        if metric in ("request_goodput", "slo_attainment") and not experiment.slo:
            raise SpilloverError(f"{where}: {metric} needs objectives, such as slo: {{ttft: 500, tpot: 50}}")
        _one_of(f"{where}: metric", metric, names)
    if experiment.max_blocks < 1:
        raise SpilloverError(f"{where}: max-blocks is {experiment.max_blocks}; at least 1 block is run, and a verdict "
                             f"takes {experiment.minimum_blocks}")
    for key in ("warmups", "retries"):
        if getattr(experiment, key) < 0:
            raise SpilloverError(f"{where}: {key} is {getattr(experiment, key)}; give 0 or more")
    if experiment.minimum_blocks < 2:
        raise SpilloverError(f"{where}: minimum-blocks is {experiment.minimum_blocks}, but one block says nothing "
                             "about chance; give at least 2")
    if not 0.5 < experiment.confidence < 1:
        raise SpilloverError(f"{where}: confidence is {experiment.confidence}; give a share such as 0.95 or 0.99")
    if not 0 <= experiment.equivalence < 1:
        raise SpilloverError(f"{where}: equivalence is {experiment.equivalence:g}; give the largest difference that "
                             "counts as the same, such as 2%, or 0 for none")
    if experiment.time_limit <= 0:
        raise SpilloverError(f"{where}: time-limit is {experiment.time_limit:g} s; give a time such as 30min or 2h")
    return experiment


def _eval(where: str, given: Mapping[str, Any]) -> EvalSpec | None:
    if not given:
        return None
    where = f"{where}, eval"
    _check_names(where, given, {"tasks", "data", "limit", "window"})
    tasks = given.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise SpilloverError(f"{where} needs tasks of spill eval, such as tasks: [perplexity, hellaswag]")
    limit = _number(where, given, "limit", int, 0)
    return EvalSpec(tuple(map(str, tasks)), str(given.get("data", EvalSpec.data)), limit or None,
                    _number(where, given, "window", int, EvalSpec.window))


def _only(experiment: Experiment, arms: list[str], workloads: list[str]) -> Experiment:
    for name in arms:
        _one_of("--arms", name, [arm.name for arm in experiment.arms])
    for name in workloads:
        _one_of("--workloads", name, [*dict.fromkeys(w.group for w in experiment.workloads),
                                      *(w.name for w in experiment.workloads)])
    kept = tuple(arm for arm in experiment.arms if not arms or arm.name in arms or arm.name == experiment.baseline)
    chosen = tuple(w for w in experiment.workloads if not workloads or w.name in workloads or w.group in workloads)
    return replace(experiment, arms=kept, workloads=chosen)


def _arm(where: str, name: str, value: Any, model: str | None) -> Arm:
    where = f"{where}, arm '{name}'"
    if not isinstance(value, Mapping):
        raise SpilloverError(f"{where} must say how to start it, such as {{engine: spillover, args: {{}}}}")
    _check_names(where, value, {"engine", "preset", "model", "args", "env", "about", "python", "url", "load",
                                "ready-seconds"})
    given: dict[str, Any] = {"kind": value.get("engine"), "args": {}, "env": {}, "about": ""}
    if value.get("preset") is not None:
        from spillover.lab.presets import find_preset

        preset = find_preset(str(value["preset"]))
        given = {"kind": preset.engine, "args": dict(preset.args), "env": dict(preset.env), "about": preset.about}
        if value.get("engine", preset.engine) != preset.engine:
            raise SpilloverError(f"{where}: preset '{value['preset']}' is of {preset.engine}, not of "
                                 f"{value['engine']}; leave 'engine' out")
    if given["kind"] is None:
        raise SpilloverError(f"{where} needs 'engine' ({', '.join(KINDS)}) or 'preset' (see spill lab list)")
    kind = _one_of(f"{where}: engine", str(given["kind"]), KINDS)
    args = {**given["args"], **{_hyphens(key): item for key, item in _mapping(where, value, "args").items()}}
    spec = EngineSpec(
        kind=kind, model=_text(where, value, "model") if "model" in value else model,
        args={key: item for key, item in args.items() if item is not None},  # null removes a flag of the preset
        env={**given["env"], **_environment(where, value)}, preset=_text(where, value, "preset"),
        python=_text(where, value, "python"), url=_text(where, value, "url"),
        ready_seconds=_number(where, value, "ready-seconds", float,
                              URL_READY_SECONDS if kind == "url" else EngineSpec.ready_seconds))
    if kind == "url" and spec.url is None:
        raise SpilloverError(f"{where} drives a server that runs already: give its address, such as "
                             "url: http://127.0.0.1:8000")
    load = {_hyphens(key): item for key, item in _mapping(where, value, "load").items()}
    _check_names(f"{where}: load", load, LOAD_OPTIONS)
    return Arm(name, spec, str(value.get("about") or given["about"]), load)


def _points(where: str, name: str, value: Any, offload: bool) -> list[WorkloadSpec]:
    """Return one workload, or one for every point of its sweep."""
    where = f"{where}, workload '{name}'"
    if not isinstance(value, Mapping):
        raise SpilloverError(f"{where} must hold options of spill bench serve, such as {{dataset-name: random}}")
    options = {_hyphens(key): item for key, item in value.items()}
    about, offload_field = str(options.pop("about", "")), options.pop("offload", None)
    try:
        offload = offload if offload_field is None else truth("offload", offload_field)
    except SpilloverError as error:
        raise SpilloverError(f"{where}: {error}") from error
    axes = {_hyphens(key): list(points) if isinstance(points, list) else [points]
            for key, points in _mapping(where, options, "sweep").items()}
    options.pop("sweep", None)
    empty = next((key for key, points in axes.items() if not points), None)
    if empty is not None:
        raise SpilloverError(f"{where}: sweep: {empty} has no values, so that nothing would be run")
    points = []
    for chosen in itertools.product(*axes.values()):
        sweep = dict(zip(axes, chosen, strict=True))
        label = ",".join(f"{key}={item}" for key, item in sweep.items())
        points.append(WorkloadSpec(f"{name}@{label}" if label else name, {**options, **sweep}, name, sweep, about,
                                   offload))
    return points


def _offload_differs(arms: Iterable[Arm]) -> bool:
    return len({tuple(sorted((key, str(item)) for key, item in arm.spec.args.items() if key in OFFLOAD_FLAGS))
                for arm in arms}) > 1


def _unique_files(where: str, arms: Iterable[Arm], workloads: Iterable[WorkloadSpec]) -> None:
    """Refuse names that map to the same part of a file name."""
    for names in ([arm.name for arm in arms], [workload.name for workload in workloads]):
        files = [file_part(name) for name in names]
        twice = next((name for name, file in zip(names, files, strict=True) if files.count(file) > 1), None)
        if twice is not None:
            raise SpilloverError(f"{where}: '{twice}' and another name would share a file; rename one")


def file_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=+-]", "_", name)


def _slo(where: str, given: Mapping[str, Any]) -> dict[str, float]:
    _check_names(f"{where}: slo", given, {"ttft", "tpot", "e2el"})
    return {str(key): _number(f"{where}: slo", given, key, float, 0.0) for key, value in given.items()
            if value is not None}


def _environment(where: str, arm: Mapping[str, Any]) -> dict[str, str]:
    given = _mapping(where, arm, "env")
    for key, value in given.items():
        if not isinstance(value, str | int | float):
            raise SpilloverError(f"{where}: env: {key} must be a text or a number; got {value!r}")
    return {str(key): str(value) for key, value in given.items()}


def _mapping(where: str, given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping of a key; empty if it is absent."""
    value = given.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpilloverError(f"{where}: {key} must hold names and values, such as {{name: value}}; got {value!r}")
    return value


def _text(where: str, given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise SpilloverError(f"{where}: {key} must be a text; got {value!r}")
    return value


def _section(where: str, document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, Mapping) or not value:
        raise SpilloverError(f"{where} needs '{key}', an object with a name and a definition for each; see docs/lab.md")
    return value


def _string(where: str, document: Mapping[str, Any], key: str) -> str:
    if not isinstance(document.get(key), str):
        raise SpilloverError(f"{where} needs '{key}', a string")
    return str(document[key])


def _number(where: str, document: Mapping[str, Any], key: str, kind: Callable[[Any], Value], default: Value) -> Value:
    value = document.get(key)
    if value is None:
        return default
    # The range excludes infinity and NaN, which cannot be converted to int.
    if (isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300
            or kind(value) != value):
        raise SpilloverError(f"{where}: {key} must be a number; got '{value}'")
    return kind(value)


def _seconds(where: str, document: Mapping[str, Any], key: str, default: float) -> float:
    value = document.get(key)
    if not isinstance(value, str):
        return _number(where, document, key, float, default)
    try:
        return parse_seconds(value)
    except (ValueError, SpilloverError) as error:
        raise SpilloverError(f"{where}: {key} is '{value}'; give a time such as 30min or 2h") from error


def _share(where: str, document: Mapping[str, Any], key: str, default: float) -> float:
    """Parse a share: 0.02 or 2%."""
    value = document.get(key)
    if not isinstance(value, str):
        return _number(where, document, key, float, default)
    try:
        return float(value.strip().removesuffix("%")) / (100 if value.strip().endswith("%") else 1)
    except ValueError:
        raise SpilloverError(f"{where}: {key} is '{value}'; give a share such as 2% or 0.02") from None


def _one_of(what: str, value: str, known: Iterable[str]) -> str:
    names = list(known)
    if value not in names:
        raise SpilloverError(f"{what} is '{value}'{did_you_mean(value, names, listed=True)}")
    return value


def _check_names(where: str, given: Mapping[str, Any], known: Set[str]) -> None:
    for key in given:
        if str(key) not in known:
            raise SpilloverError(f"{where}: there is no '{key}'{did_you_mean(str(key), sorted(known), listed=True)}")


def _hyphens(key: object) -> str:
    return str(key).replace("_", "-")
