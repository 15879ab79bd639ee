"""The data of a report: a result folder, read once into plain data from which every page, table and plot is made.

Nothing is judged here: verdicts, faults and medians are those of the folder's analysis.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from spillover.bench.records import Run
from spillover.lab.analysis import analysis_of
from spillover.lab.store import Results

PLAN = ("max_blocks", "time_limit", "order", "restart", "window", "confidence", "minimum_blocks", "equivalence",
        "warmups", "slo", "gates")
Part = TypeVar("Part", "Report", "Arm", "Workload", "Cell", "Visit", "Verdict")
FORMATS = {"dummy": "random weights", "null": "no model"}  # load formats whose answers are meaningless


@dataclass(frozen=True)
class Fault:
    """Why a run does not count; a `fatal` fault leaves its arm without a verdict, others are for information."""

    gate: str
    reason: str
    fatal: bool = True
    metric: str = ""  # the only metric it concerns; "" for all


@dataclass(frozen=True)
class Verdict:
    """One arm against the baseline on one workload by one metric. `ratio` is arm / baseline, as measured."""

    workload: str
    arm: str
    metric: str
    primary: bool
    verdict: str  # "faster", "slower", "same", "no difference shown" or "no verdict"
    word: str  # the verdict as displayed: "same within 2%"
    why: str = ""  # why there is no verdict
    higher_is_better: bool = True
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None  # confidence of low .. high
    p: float | None = None
    blocks: int = 0
    block_ratios: tuple[float, ...] = ()

    def gain(self, ratio: float | None) -> float | None:
        """Return a ratio inverted if necessary so that above 1 is better."""
        return None if not ratio else ratio if self.higher_is_better else 1 / ratio

    @property
    def gains(self) -> tuple[float, float, float] | None:
        """Return (gain, least, most); None if nothing was measured. Without a range all three are the gain."""
        gain = self.gain(self.ratio)
        if gain is None:
            return None
        low, high = (self.gain(end) or gain for end in (self.low, self.high))
        return gain, min(low, high), max(low, high)


@dataclass(frozen=True)
class Arm:
    name: str
    engine: str
    about: str = ""
    label: str = ""  # why its numbers are not those of a real model, such as "random weights"; "" if they are
    model: str = ""
    preset: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    status: str = "ready"  # or "skipped", "failed"
    reason: str = ""
    install: str = ""
    version: str = ""
    command: str = ""  # in shell syntax
    pool_tokens: int | None = None
    log_tail: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)  # accuracy by task and metric
    no_scores: str = ""  # why there are none although they were requested


@dataclass(frozen=True)
class Workload:
    name: str
    group: str = ""
    about: str = ""
    sweep: Mapping[str, Any] = field(default_factory=dict)  # option values of the point of a sweep: {"request-rate": 4}
    options: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One arm on one workload: the medians over its visits, and their faults."""

    workload: str
    arm: str
    status: str  # "ok", "failed", "skipped", "incomplete"
    valid: bool
    reason: str = ""
    faults: tuple[Fault, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by metric, one value per visit
    medians: Mapping[str, float] = field(default_factory=dict)
    steady: Mapping[str, float] = field(default_factory=dict)  # medians within the steady-state window
    sources: Mapping[str, float] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)  # mean ms per request by phase
    hit_rate: float | None = None
    limit: str = "-"
    limit_percent: float | None = None
    requests: int = 0
    errors: int = 0
    visits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Visit:
    """One run of one workload on one arm."""

    key: str
    index: int  # position in the order of running
    block: int
    workload: str
    arm: str
    status: str
    reason: str = ""
    log_tail: str = ""  # end of the server's log if it failed
    started: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    retried_faults: tuple[Fault, ...] = ()  # faults of earlier attempts, for which the run was repeated
    client: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[[], Run | None] = lambda: None  # reads every event; returns None if the visit failed
    monitors_path: Path | None = None


@dataclass(frozen=True)
class Report:
    folder: Path
    name: str
    about: str
    seed: str
    scale: str
    baseline: str
    primary: str
    metrics: tuple[str, ...]  # compared metrics, primary first
    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    cells: tuple[Cell, ...]
    visits: tuple[Visit, ...]
    verdicts: tuple[Verdict, ...]
    plan: Mapping[str, Any]  # configuration of the experiment: limits, order, restart, confidence ...
    blocks: int
    stopped: str | None  # "decided", "answered", "max-blocks" or "time-limit"; None if not stopped
    stop_text: str
    family: Mapping[str, Any]
    provenance: Mapping[str, Any]
    document: Mapping[str, Any]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def cell(self, workload: str, arm: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.workload == workload and cell.arm == arm), None)

    def ran(self, workload: str, arm: str) -> list[Visit]:
        """Return the visits that have results."""
        return [visit for visit in self.visits if visit.workload == workload and visit.arm == arm
                and visit.status == "ok"]

    def shown(self, arm: Arm) -> bool:
        """Return whether there is anything to draw for an arm."""
        return any(visit.arm == arm.name and visit.status == "ok" for visit in self.visits)

    def typical(self, workload: str, arm: str) -> Visit | None:
        """Return the visit with the median primary metric: the one to draw over time."""
        visits = sorted(self.ran(workload, arm), key=lambda visit: visit.metrics.get(self.primary, 0.0))
        return visits[len(visits) // 2] if visits else None

    def primary_verdicts(self) -> Sequence[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.primary]

    def groups(self) -> dict[str, list[Workload]]:
        """Return the workloads of each sweep together; a workload without a sweep is a group of one."""
        groups: dict[str, list[Workload]] = {}
        for workload in self.workloads:
            groups.setdefault(workload.group or workload.name, []).append(workload)
        return groups


def read_report(folder: Path) -> Report:
    """Read a folder of `spill lab run`, finished or not."""
    results = Results.open(folder)
    experiment, analysis = results.experiment, analysis_of(results)
    stats = {visit["workload"]: visit["workload_stats"] for visit in results.visits if visit.get("workload_stats")}
    return _read(
        Report, experiment,
        folder=folder,
        seed=experiment.get("seed") or "",
        metrics=tuple(experiment["metrics"]),
        arms=tuple(_arm(arm, results.arms.get(arm["name"]), results.evals.get(arm["name"]) or {})
                   for arm in experiment["arms"]),
        workloads=tuple(_read(Workload, workload, stats=stats.get(workload["name"], {}))
                        for workload in experiment["workloads"]),
        cells=tuple(_cell(cell) for cell in analysis["cells"]),
        visits=tuple(_visit(results, visit) for visit in results.visits),
        verdicts=tuple(_read(Verdict, verdict, higher_is_better=verdict.get("better") != "lower",
                             block_ratios=tuple(verdict.get("block_ratios") or ()))
                       for verdict in analysis["verdicts"]),
        plan={key: experiment[key] for key in PLAN if experiment.get(key) is not None},
        blocks=analysis["blocks"],
        stopped=analysis["stopped"]["reason"],
        stop_text=analysis["stopped"]["text"],
        family=analysis.get("family") or {},
        provenance=results.sessions[-1] if results.sessions else experiment.get("provenance") or {},
    )


def _read(kind: type[Part], written: Mapping[str, Any], **made: Any) -> Part:
    """Make a part of the report: `made` as it is, other fields from entries of the same name in the file, if
    present."""
    names = {item.name for item in fields(kind)}
    found = {name: value for name, value in written.items() if name in names and value is not None}
    return kind(**{**found, **made})


def _arm(planned: Mapping[str, Any], record: Mapping[str, Any] | None, evaluated: Mapping[str, Any]) -> Arm:
    spec, found = planned.get("spec") or {}, record or {"status": "not started"}
    args = spec.get("args") or {}
    return _read(
        Arm, {**found, **spec, **planned},
        engine=spec.get("kind") or "",
        label=planned.get("label") or FORMATS.get(str(args.get("load-format")), ""),
        args=args,
        command=shlex.join(found.get("command") or []),
        pool_tokens=found.get("device_pool_tokens"),
        scores=evaluated.get("scores") or {},
        no_scores=evaluated.get("reason") or "",
    )


def _cell(written: Mapping[str, Any]) -> Cell:
    metrics, limit = written.get("metrics") or {}, written.get("limit") or {}
    return _read(
        Cell, written,
        faults=tuple(_fault(fault) for fault in written.get("faults") or ())
        + tuple(_fault(note, fatal=False) for note in written.get("notes") or ()),
        values={name: tuple(value for value in summary.get("values") or () if value is not None)
                for name, summary in metrics.items()},
        medians=_medians(metrics),
        steady=_medians(written.get("window_metrics") or {}),
        split={phase: value for phase, value in (written.get("latency_split") or {}).items() if value is not None},
        limit=limit.get("text") or "-",
        limit_percent=limit.get("percent"),
        visits=tuple(written.get("visits") or ()),
    )


def _visit(results: Results, written: Mapping[str, Any]) -> Visit:
    return _read(
        Visit, written,
        metrics={name: value for name, value in (written.get("metrics") or {}).items() if value is not None},
        faults=tuple(_fault(fault) for fault in written.get("faults") or ()),
        # "spoilt": the name in results recorded by earlier versions
        retried_faults=tuple(map(_fault, written.get("retried_faults") or written.get("spoilt") or ())),
        run=lambda: results.run(written),
        monitors_path=results.path / written["monitors"] if written.get("monitors") else None,
    )


def _fault(written: Mapping[str, Any], fatal: bool = True) -> Fault:
    return Fault(written["gate"], written["reason"], bool(written.get("fatal", fatal)), written.get("metric") or "")


def _medians(summaries: Mapping[str, Any]) -> dict[str, float]:
    return {name: summary["median"] for name, summary in summaries.items() if summary.get("median") is not None}
