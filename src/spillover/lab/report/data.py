"""What a report is about: a result folder, read once into plain data that every page, table and plot is made of.

Nothing is judged here: verdicts, faults and medians are those of the folder's analysis.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillover.bench.records import Run
from spillover.lab.analysis import analysis_of
from spillover.lab.store import Results

PHASES = ("queue", "restore", "prefill", "decode")
SOURCES = ("computed", "device", "host", "disk", "remote")
PLAN = ("max_blocks", "time_limit", "order", "restart", "window", "confidence", "minimum_blocks", "equivalence",
        "warmups", "slo", "gates")
FORMATS = {"dummy": "random weights", "null": "no model"}  # a load format whose answers mean nothing


@dataclass(frozen=True)
class Fault:
    """Why a run does not count; `fatal` ones leave an arm without a verdict, others are to be known."""

    gate: str
    reason: str
    fatal: bool = True
    metric: str = ""  # the only one it concerns


@dataclass(frozen=True)
class Verdict:
    """One arm beside the baseline on one workload by one metric. `ratio` is arm / baseline, as measured."""

    workload: str
    arm: str
    metric: str
    primary: bool
    verdict: str  # "faster", "slower", "same", "no difference shown" or "no verdict"
    word: str  # the verdict as it is read: "same within 2%"
    why: str = ""  # there is no verdict
    higher_is_better: bool = True
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None  # of low .. high
    p: float | None = None
    blocks: int = 0
    block_ratios: tuple[float, ...] = ()

    def gain(self, ratio: float | None) -> float | None:
        """A ratio turned so that above 1 is better, whichever way the metric counts."""
        return None if not ratio else ratio if self.higher_is_better else 1 / ratio

    @property
    def gains(self) -> tuple[float, float, float] | None:
        """(gain, least, most); None where nothing was measured. Without a range all three are the gain."""
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
    label: str = ""  # "dummy weights", "mock": whatever makes its numbers not those of a real model
    model: str = ""
    preset: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    status: str = "ready"  # or "skipped", "failed"
    reason: str = ""
    install: str = ""
    version: str = ""
    command: str = ""  # as a shell takes it
    pool_tokens: int | None = None
    log_tail: str = ""


@dataclass(frozen=True)
class Workload:
    name: str
    group: str = ""
    about: str = ""
    sweep: Mapping[str, Any] = field(default_factory=dict)  # the point of a sweep: {"request-rate": 4}
    options: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One arm on one workload: the medians over its visits, and what is wrong with them."""

    workload: str
    arm: str
    status: str  # "ok", "failed", "skipped", "incomplete"
    valid: bool
    reason: str = ""
    faults: tuple[Fault, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by metric, one a visit
    medians: Mapping[str, float] = field(default_factory=dict)
    steady: Mapping[str, float] = field(default_factory=dict)  # medians within the steady-state window
    sources: Mapping[str, float] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)  # mean ms a request by phase
    hit_rate: float | None = None
    limit: str = "-"
    limit_percent: float | None = None
    requests: int = 0
    errors: int = 0
    visits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Visit:
    """One run of one workload against one arm."""

    key: str
    index: int  # in the order they were run
    block: int
    workload: str
    arm: str
    status: str
    reason: str = ""
    log_tail: str = ""  # where the server failed
    started: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    spoilt: tuple[Fault, ...] = ()  # of attempts before it, which were run again
    client: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[[], Run | None] = lambda: None  # every event, read when asked for; None where the visit failed
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
    metrics: tuple[str, ...]  # that verdicts are about, primary first
    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    cells: tuple[Cell, ...]
    visits: tuple[Visit, ...]
    verdicts: tuple[Verdict, ...]
    headline: tuple[str, ...]
    plan: Mapping[str, Any]  # limits, order, restart, confidence ...: how it was run
    blocks: int
    stopped: str | None  # "decided", "max-blocks", "time-limit"; None: it goes on
    stop_text: str
    family: Mapping[str, Any]
    provenance: Mapping[str, Any]
    document: Mapping[str, Any]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def cell(self, workload: str, arm: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.workload == workload and cell.arm == arm), None)

    def ran(self, workload: str, arm: str) -> list[Visit]:
        """The visits that gave numbers."""
        return [visit for visit in self.visits if visit.workload == workload and visit.arm == arm
                and visit.status == "ok"]

    def shown(self, arm: Arm) -> bool:
        """Whether there is anything to draw of it."""
        return any(visit.arm == arm.name and visit.status == "ok" for visit in self.visits)

    def typical(self, workload: str, arm: str) -> Visit | None:
        """The visit whose primary metric lies in the middle: the one to draw over time."""
        visits = sorted(self.ran(workload, arm), key=lambda visit: visit.metrics.get(self.primary, 0.0))
        return visits[len(visits) // 2] if visits else None

    def primary_verdicts(self) -> Sequence[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.primary]

    def groups(self) -> dict[str, list[Workload]]:
        """Workloads of a sweep together; a workload of its own is a group of one."""
        groups: dict[str, list[Workload]] = {}
        for workload in self.workloads:
            groups.setdefault(workload.group or workload.name, []).append(workload)
        return groups


def read_report(folder: Path) -> Report:
    """`folder` as `spill lab run` leaves it, finished or not."""
    results = Results.open(folder)
    experiment, analysis = results.experiment, analysis_of(results)
    stats = {visit["workload"]: visit["workload_stats"] for visit in results.visits if visit.get("workload_stats")}
    return Report(
        folder=folder,
        name=experiment["name"],
        about=experiment.get("about") or "",
        seed=experiment.get("seed") or "",
        scale=experiment.get("scale") or "",
        baseline=experiment["baseline"],
        primary=experiment["primary"],
        metrics=tuple(experiment["metrics"]),
        arms=tuple(_arm(arm, results.arms.get(arm["name"])) for arm in experiment["arms"]),
        workloads=tuple(_workload(workload, stats) for workload in experiment["workloads"]),
        cells=tuple(_cell(cell) for cell in analysis["cells"]),
        visits=tuple(_visit(results, visit) for visit in results.visits),
        verdicts=tuple(_verdict(verdict) for verdict in analysis["verdicts"]),
        headline=tuple(analysis.get("headline") or ()),
        plan={key: experiment[key] for key in PLAN if experiment.get(key) is not None},
        blocks=analysis["blocks"],
        stopped=analysis["stopped"]["reason"],
        stop_text=analysis["stopped"]["text"],
        family=analysis.get("family") or {},
        provenance=results.sessions[-1] if results.sessions else experiment.get("provenance") or {},
        document=experiment.get("document") or {},
    )


def _arm(asked: Mapping[str, Any], told: Mapping[str, Any] | None) -> Arm:
    spec, found = asked.get("spec") or {}, told or {"status": "not started"}
    args = spec.get("args") or {}
    return Arm(
        name=asked["name"],
        engine=spec.get("kind") or "",
        about=asked.get("about") or "",
        label=asked.get("label") or FORMATS.get(str(args.get("load-format")), ""),
        model=str(spec.get("model") or ""),
        preset=spec.get("preset") or "",
        args=args,
        env=spec.get("env") or {},
        status=found["status"],
        reason=found.get("reason") or "",
        install=found.get("install") or "",
        version=found.get("version") or "",
        command=shlex.join(found.get("command") or []),
        pool_tokens=found.get("device_pool_tokens"),
        log_tail=found.get("log_tail") or "",
    )


def _workload(written: Mapping[str, Any], stats: Mapping[str, Mapping[str, Any]]) -> Workload:
    return Workload(
        name=written["name"],
        group=written.get("group") or "",
        about=written.get("about") or "",
        sweep=written.get("sweep") or {},
        options=written.get("options") or {},
        stats=stats.get(written["name"], {}),
    )


def _cell(written: Mapping[str, Any]) -> Cell:
    metrics, limit = written.get("metrics") or {}, written.get("limit") or {}
    return Cell(
        workload=written["workload"],
        arm=written["arm"],
        status=written["status"],
        valid=bool(written.get("valid")),
        reason=written.get("reason") or "",
        faults=tuple(_fault(fault) for fault in written.get("faults") or ())
        + tuple(_fault(note, fatal=False) for note in written.get("notes") or ()),
        values={name: tuple(value for value in summary.get("values") or () if value is not None)
                for name, summary in metrics.items()},
        medians=_medians(metrics),
        steady=_medians(written.get("window_metrics") or {}),
        sources=written.get("sources") or {},
        split={phase: value for phase, value in (written.get("latency_split") or {}).items() if value is not None},
        hit_rate=written.get("hit_rate"),
        limit=limit.get("text") or "-",
        limit_percent=limit.get("percent"),
        requests=int(written.get("requests") or 0),
        errors=int(written.get("errors") or 0),
        visits=tuple(written.get("visits") or ()),
    )


def _visit(results: Results, written: Mapping[str, Any]) -> Visit:
    return Visit(
        key=written["key"],
        index=written["index"],
        block=written["block"],
        workload=written["workload"],
        arm=written["arm"],
        status=written["status"],
        reason=written.get("reason") or "",
        log_tail=written.get("log_tail") or "",
        started=written.get("started") or 0.0,
        metrics={name: value for name, value in (written.get("metrics") or {}).items() if value is not None},
        faults=tuple(_fault(fault) for fault in written.get("faults") or ()),
        spoilt=tuple(_fault(fault) for fault in written.get("spoilt") or ()),
        client=written.get("client") or {},
        run=lambda: results.run(written),
        monitors_path=results.path / written["monitors"] if written.get("monitors") else None,
    )


def _verdict(written: Mapping[str, Any]) -> Verdict:
    return Verdict(
        workload=written["workload"],
        arm=written["arm"],
        metric=written["metric"],
        primary=bool(written["primary"]),
        verdict=written["verdict"],
        word=written["word"],
        why=written.get("why") or "",
        higher_is_better=written.get("better") != "lower",
        ratio=written.get("ratio"),
        low=written.get("low"),
        high=written.get("high"),
        confidence=written.get("confidence"),
        p=written.get("p"),
        blocks=int(written.get("blocks") or 0),
        block_ratios=tuple(written.get("block_ratios") or ()),
    )


def _fault(written: Mapping[str, Any], fatal: bool = True) -> Fault:
    return Fault(written["gate"], written["reason"], bool(written.get("fatal", fatal)), written.get("metric") or "")


def _medians(summaries: Mapping[str, Any]) -> dict[str, float]:
    return {name: summary["median"] for name, summary in summaries.items() if summary.get("median") is not None}
