"""Figures as data: what to draw, not how. The page draws them as SVG in the browser, `plots` as PNG files.

Time is measured from the start of a run. If an arm ran several times, its visit with the median primary metric is drawn
over time; distributions pool all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from spillover.bench.records import Run
from spillover.bench.target import PHASES, SOURCES
from spillover.lab.accuracy import KL
from spillover.lab.report.data import Cell, Report, Visit
from spillover.lab.report.metric import metric

BINS = 160  # number of bins over time: enough to show a spike of one step, few enough for a small page
CURVE_METRICS = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms")


@dataclass(frozen=True)
class Axis:
    label: str
    unit: str = ""
    log: bool = False


@dataclass(frozen=True)
class Line:
    arm: str
    points: tuple[tuple[float, float], ...]
    upper: tuple[float, ...] = ()  # upper edges above the points, such as the maximum of a bin
    notes: tuple[str, ...] = ()  # one tooltip per point
    hollow: tuple[bool, ...] = ()  # whether each point does not count


@dataclass(frozen=True)
class Panel:
    """One plot. A figure has one for each workload and each selectable choice."""

    workload: str
    choice: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    better: Literal["higher", "lower", ""] = ""


@dataclass(frozen=True)
class LineFigure:
    key: str
    title: str
    about: str
    style: Literal["line", "curve", "dots", "steps"]
    panels: tuple[Panel, ...]
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class StackRow:
    workload: str
    arm: str
    parts: tuple[float, ...]
    note: str = ""


@dataclass(frozen=True)
class StackFigure:
    """Bars made of parts. `share` draws each to the full width."""

    key: str
    title: str
    about: str
    parts: tuple[str, ...]
    unit: str
    share: bool
    rows: tuple[StackRow, ...]
    kind: Literal["stack"] = "stack"


Figure = LineFigure | StackFigure


def figures(report: Report) -> list[Figure]:
    """Return the figures for which there are results, in reading order."""
    made: list[Figure | None] = [
        pareto(report), curves(report), latency_split(report), hit_rates(report), every_run(report),
        first_tokens(report), token_rate(report), token_gaps(report), machine(report),
    ]
    return [figure for figure in made if figure is not None]


def as_json(figure: Figure) -> dict[str, Any]:
    return asdict(figure)


def pareto(report: Report) -> LineFigure | None:
    """Plot speed against KL divergence from the baseline: one point per arm, best at the lower right."""
    key, panels = f"perplexity {KL}", []
    what = metric("output_throughput")
    for workload in report.workloads:
        lines = []
        for arm in report.arms:
            cell = report.cell(workload.name, arm.name)
            if cell is not None and key in arm.scores and what.key in cell.medians:
                lines.append(Line(arm.name, ((cell.medians[what.key], arm.scores[key]),), hollow=(not cell.valid,)))
        panels.append(Panel(workload.name, "", Axis(what.label, what.unit), Axis("KL divergence, at least", "nats"),
                            tuple(lines), "lower"))
    return _lines("pareto", "Speed against KL divergence",
                  "Right is faster, down is nearer to the baseline's distributions. An arm is worth using if no other "
                  "is further right and further down; hollow points did not pass the gates.", "curve", panels)


def curves(report: Report) -> LineFigure | None:
    """Plot sweeps: throughput against each latency."""
    panels = []
    for group, workloads in report.groups().items():
        if len(workloads) < 2:
            continue
        for key in CURVE_METRICS:
            along, lines = "output_throughput", []
            for arm in report.arms:
                points, notes, hollow = [], [], []
                for workload in workloads:
                    cell = report.cell(workload.name, arm.name)
                    if cell is None or key not in cell.medians or along not in cell.medians:
                        continue
                    points.append((cell.medians[along], cell.medians[key]))
                    notes.append(", ".join(f"{name} {value}" for name, value in workload.sweep.items()))
                    hollow.append(not cell.valid)
                if points:
                    lines.append(Line(arm.name, tuple(points), notes=tuple(notes), hollow=tuple(hollow)))
            what, x = metric(key), metric(along)
            panels.append(Panel(group, what.label, Axis(f"{x.label} reached", x.unit), Axis(what.label, what.unit),
                                tuple(lines), "higher" if what.higher_is_better else "lower"))
    return _lines("curves", "Throughput against latency",
                  "One point for each step of the sweep, medians over runs; hollow points did not pass the gates.",
                  "curve", panels)


def _measured(report: Report) -> Iterator[tuple[str, str, Cell]]:
    """Yield workload, arm and their cell, for each that has a result."""
    for workload in report.workloads:
        for arm in report.arms:
            cell = report.cell(workload.name, arm.name)
            if cell is not None and cell.status == "ok":
                yield workload.name, arm.name, cell


def latency_split(report: Report) -> StackFigure | None:
    rows = []
    for workload, arm, cell in _measured(report):
        phases = tuple(cell.split.get(phase, 0.0) for phase in PHASES)
        if any(phases):
            rows.append(StackRow(workload, arm, (*phases, 0.0, 0.0)))
            continue
        first, whole = cell.medians.get("mean_ttft_ms"), cell.medians.get("mean_e2el_ms")
        if first is not None and whole is not None:
            rows.append(StackRow(workload, arm, (0.0, 0.0, 0.0, 0.0, first, max(0.0, whole - first)),
                                 "as measured by the client; this server reports no details"))
    if not rows:
        return None
    return StackFigure("split", "Where a request's time goes", "Mean over requests, as the server timed them.",
                       (*PHASES, "to first token", "after it"), "ms", False, tuple(rows))


def hit_rates(report: Report) -> StackFigure | None:
    rows = []
    for workload, arm, cell in _measured(report):
        if cell.sources and sum(cell.sources.values()) > 0:
            total = sum(cell.sources.values())
            rows.append(StackRow(workload, arm,
                                 (*(cell.sources.get(source, 0) / total for source in SOURCES), 0.0)))
        elif cell.hit_rate is not None:
            none = [0.0] * (len(SOURCES) - 1)
            rows.append(StackRow(workload, arm, (1 - cell.hit_rate, *none, cell.hit_rate),
                                 "by the engine's hit counter; it does not name the tier"))
    if not rows:
        return None
    return StackFigure("sources", "Where prompt tokens came from",
                       "Share of prompt tokens that were computed, or found in a tier; together they are all of them.",
                       (*SOURCES, "cached"), "%", True, tuple(rows))


def every_run(report: Report) -> LineFigure | None:
    """Return all visits in the order they ran, which shows drift of the machine."""
    panels = []
    for workload in report.workloads:
        for key in report.metrics:
            lines = []
            for arm in report.arms:
                visits = [visit for visit in report.ran(workload.name, arm.name) if key in visit.metrics]
                if visits:
                    lines.append(Line(arm.name, tuple((float(visit.index), visit.metrics[key]) for visit in visits),
                                      notes=tuple(_visit_note(visit) for visit in visits),
                                      hollow=tuple(bool(visit.faults) for visit in visits)))
            what = metric(key)
            panels.append(Panel(workload.name, what.label, Axis("run, in the order they were made"),
                                Axis(what.label, what.unit), tuple(lines),
                                "higher" if what.higher_is_better else "lower"))
    return _lines("runs", "Every run, in order",
                  "Arms take turns, so that a machine that grows slower or faster does so for all of them; hollow dots "
                  "did not pass the gates.", "dots", panels)


def first_tokens(report: Report) -> LineFigure | None:
    panels = []
    for workload in report.workloads:
        lines = []
        for arm in report.arms:
            times = [record.chunks[0][0] - record.sent for visit in report.ran(workload.name, arm.name)
                     if (run := visit.run()) is not None for record in run.completed if record.chunks]
            if times:
                shares = np.linspace(0, 1, min(len(times), BINS) + 1)[1:]
                values = np.quantile(np.asarray(times), shares) * 1e3
                lines.append(Line(arm.name, _points(values, shares)))
        panels.append(Panel(workload.name, "", Axis("time to first token", "ms", log=True),
                            Axis("share of requests", "%"), tuple(lines)))
    return _lines("ttft", "How long first tokens take",
                  "Of all requests of all runs, the share that had its first token within the time: left is better.",
                  "steps", panels)


def token_gaps(report: Report) -> LineFigure | None:
    """Return the inter-token latency over time: spikes are delayed steps, for example by another request's prefill."""
    panels = []
    for workload, drawn in _typical_runs(report):
        lines = []
        for arm, run in drawn:
            times, gaps = gaps_over_time(run)
            if times.size:
                middles, (medians, worst) = _binned(times, gaps * 1e3, run.duration, np.median, np.max)
                lines.append(Line(arm, _points(middles, medians), upper=tuple(_rounded(worst))))
        panels.append(Panel(workload, "", Axis("time in the run", "s"), Axis("gap between tokens", "ms"),
                            tuple(lines), "lower"))
    return _lines("itl", "Gaps between tokens over time",
                  "The line is the median of all streams in a moment, thin strokes reach to the longest gap. "
                  "For each arm, its run with the median result.", "line", panels)


def token_rate(report: Report) -> LineFigure | None:
    panels = []
    for workload, drawn in _typical_runs(report):
        lines = []
        for arm, run in drawn:
            chunks = np.array([chunk for record in run.records for chunk in record.chunks], dtype=float).reshape(-1, 2)
            if len(chunks) and run.duration > 0:
                width = max(run.duration / BINS, min(1.0, run.duration / 20))
                edges = np.arange(0, run.duration + width, width)
                counts, _ = np.histogram(chunks[:, 0], edges, weights=chunks[:, 1])
                lines.append(Line(arm, _points(edges[:-1] + width / 2, counts / width)))
        panels.append(Panel(workload, "", Axis("time in the run", "s"), Axis("output", "tok/s"), tuple(lines),
                            "higher"))
    return _lines("rate", "Output tokens over time", "For each arm, its run with the median result.", "line", panels)


def machine(report: Report) -> LineFigure | None:
    """Return the values of the monitors over time: memory first."""
    from spillover.lab.report.monitored import choices

    panels = []
    for workload in report.workloads:
        lines: dict[str, tuple[Axis, list[Line]]] = {}
        for arm in report.arms:
            visit = report.typical(workload.name, arm.name)
            if visit is None or visit.monitors_path is None or not visit.monitors_path.is_file():
                continue
            run = visit.run()
            start = run.start_unix if run is not None else visit.started
            for choice in choices(visit.monitors_path, start):
                kept = _thinned(choice.points)
                lines.setdefault(choice.name, (Axis(choice.label, choice.unit), []))[1].append(Line(arm.name, kept))
        panels += [Panel(workload.name, name, Axis("time in the run", "s"), axis, tuple(drawn))
                   for name, (axis, drawn) in lines.items()]
    order = {name: index for index, name in enumerate(dict.fromkeys(panel.choice for panel in panels))}
    panels.sort(key=lambda panel: order[panel.choice])
    return _lines("machine", "Memory and machine over time",
                  "Sampled during the run on the same clock; time 0 is when the load began. For each arm, its run "
                  "with the median result.", "line", panels)


def gaps_over_time(run: Run) -> tuple[Any, Any]:
    """Return (when, gap) of every token after its request's first, in seconds; k tokens in a chunk are k equal gaps."""
    times, gaps = [], []
    for record in run.completed:
        for (before, _), (at, count) in zip(record.chunks, record.chunks[1:], strict=False):
            times += [at] * count
            gaps += [(at - before) / count] * count
    return np.asarray(times), np.asarray(gaps)


def _typical_runs(report: Report) -> Iterable[tuple[str, list[tuple[str, Run]]]]:
    for workload in report.workloads:
        visits = [(arm.name, report.typical(workload.name, arm.name)) for arm in report.arms]
        yield workload.name, [(arm, run) for arm, visit in visits if visit is not None and (run := visit.run())]


def _binned(times: Any, values: Any, duration: float, *summaries: Any) -> tuple[Any, list[Any]]:
    """Return the non-empty bins: a line must not fall to zero where no request ran."""
    width = max(duration, float(times.max()), 1e-9) / min(BINS, max(1, times.size // 12))
    which = np.floor(times / width).astype(int)
    order = np.argsort(which, kind="stable")
    bins, starts = np.unique(which[order], return_index=True)
    parts = np.split(values[order], starts[1:])
    return (bins + 0.5) * width, [np.array([summary(part) for part in parts]) for summary in summaries]


def _visit_note(visit: Visit) -> str:
    return f"block {visit.block}" + "".join(f"; {fault.gate}: {fault.reason}" for fault in visit.faults)


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    step = -(-len(points) // (2 * BINS)) or 1
    values = np.asarray(points[::step]).reshape(-1, 2)
    return _points(values[:, 0], values[:, 1])


def _points(x: Any, y: Any) -> tuple[tuple[float, float], ...]:
    return tuple(zip(_rounded(x), _rounded(y), strict=True))


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.5g}") for value in np.asarray(values, dtype=float)]


def _lines(key: str, title: str, about: str, style: Literal["line", "curve", "dots", "steps"],
           panels: Sequence[Panel]) -> LineFigure | None:
    """Return the figure without panels that have no line; None if no panel has one."""
    drawn = tuple(panel for panel in panels if panel.lines)
    return LineFigure(key, title, about, style, drawn) if drawn else None
