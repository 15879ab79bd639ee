"""The tables of a report, as text and sortable values; HTML, Markdown and CSV are made from the same tables."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from spillover.lab.report.data import Cell, Report, Verdict, Workload
from spillover.lab.report.metric import metric, shown

NOTHING = "-"
USUAL = ("output_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms",
         "median_e2el_ms")


@dataclass(frozen=True)
class TableCell:
    text: str
    value: float | None = None  # sort key
    detail: str = ""  # smaller text next to the main one
    tone: str = ""  # "good", "bad", "soft" or none
    title: str = ""  # tooltip


@dataclass(frozen=True)
class Table:
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    numbers_from: int = 1  # index of the first numeric column
    about: str = ""
    arms: tuple[str, ...] = ()  # one per row, if rows are arms


def gain_text(verdict: Verdict) -> str:
    """Format times better than the baseline, '1.84x (1.71 .. 1.98)'; "-" if there is no verdict."""
    if verdict.gains is None or verdict.verdict == "no verdict":
        return NOTHING
    gain, low, high = verdict.gains
    interval = f" ({times(low)} .. {times(high)})" if verdict.low is not None else ""
    return f"{times(gain)}x{interval}"


def times(value: float) -> str:
    if value < 0.1:
        return f"{value:.1g}"
    return f"{value:.3f}" if 0.9 < value < 1.1 else f"{value:.2f}" if value < 20 else f"{value:,.0f}"


def measured(report: Report, workload: Workload) -> Table:
    """Return one row per arm: the medians over its runs, and their spread."""
    keys = [key for key in dict.fromkeys((*report.metrics, *USUAL))
            if any(key in cell.medians for cell in report.cells if cell.workload == workload.name)]
    hits = any(_hit_rate(cell) is not None for cell in report.cells if cell.workload == workload.name)
    headings = ["arm", *(metric(key).title for key in keys), "of limit", *(["prefix hits"] if hits else []), "requests"]
    rows = []
    for arm in report.arms:
        cell = report.cell(workload.name, arm.name)
        name = TableCell(arm.name, detail=arm.label or ("baseline" if arm.name == report.baseline else ""))
        if cell is None or not cell.medians:
            why = (cell.reason if cell else "") or arm.reason or "did not run"
            status = cell.status if cell else arm.status
            rows.append((name, TableCell(status, tone="soft", title=why), *[TableCell(NOTHING)] * (len(headings) - 2)))
            continue
        values = [_value(cell, key) for key in keys]
        count = len(cell.visits)
        runs = f"{count} run{'s' * (count != 1)}" + (f", {cell.errors:,} failed" if cell.errors else "")
        rows.append((name, *values, TableCell(cell.limit, cell.limit_percent), *([_hits(cell)] if hits else []),
                     TableCell(f"{cell.requests:,}", cell.requests, runs, "bad" if cell.errors else "")))
    return Table(workload.name, tuple(headings), tuple(rows), about=workload.about,
                 arms=tuple(arm.name for arm in report.arms))


def secondary(report: Report) -> Table | None:
    """Return all verdicts of metrics other than the primary one."""
    keys = [key for key in report.metrics if key != report.primary]
    if not keys:
        return None
    found = {(verdict.workload, verdict.arm, verdict.metric): verdict for verdict in report.verdicts}
    rows = []
    for workload in report.workloads:
        for arm in report.arms:
            verdicts = [found.get((workload.name, arm.name, key)) for key in keys]
            if any(verdicts) and arm.status != "skipped":
                rows.append((TableCell(workload.name), TableCell(arm.name), *map(_verdict_cell, verdicts)))
    return Table("Other metrics", ("workload", "arm", *(metric(key).label for key in keys)), tuple(rows), 2,
                 about="Times better than the baseline with its interval; a word where it is decided.")


def accuracy(report: Report) -> Table | None:
    """Return the results of `spill eval` for each arm; None if the experiment does not evaluate."""
    if not any(arm.scores or arm.no_scores for arm in report.arms):
        return None
    keys = list(dict.fromkeys(key for arm in report.arms for key in arm.scores))
    rows = [(TableCell(arm.name, detail=arm.no_scores), *(
        TableCell(f"{arm.scores[key]:.4g}", arm.scores[key]) if key in arm.scores else TableCell(NOTHING)
        for key in keys)) for arm in report.arms if arm.scores or arm.no_scores]
    return Table("Accuracy", ("arm", *(key.replace("_", " ") for key in keys)), tuple(rows),
                 about="Run once on each arm's server; divergence and agreement are against the baseline. A server "
                       "shows its 20 likeliest tokens, so that the divergence is a lower bound.",
                 arms=tuple(row[0].text for row in rows))


def counters_table(report: Report, title: str, columns: Mapping[str, tuple[str, str]], needs: str, about: str,
                   note: Callable[[Cell], str] | None = None,
                   more: Mapping[str, Callable[[Cell], str]] | None = None) -> Table | None:
    """Return a row for each workload and arm that has the metric `needs`; None if there are none. `columns`: heading ->
    (metric, unit); `note` precedes the arm's label; `more`: heading -> text, after the columns."""
    rows = []
    for workload in report.workloads:
        for arm in report.arms:
            cell = report.cell(workload.name, arm.name)
            if cell is None or needs not in cell.medians:
                continue
            values = [(cell.medians.get(key), unit) for key, unit in columns.values()]
            rows.append((TableCell(workload.name), TableCell(arm.name, detail=(note and note(cell)) or arm.label),
                         *(TableCell(NOTHING) if value is None else TableCell(shown(value, unit), value)
                           for value, unit in values), *(TableCell(text(cell)) for text in (more or {}).values())))
    return Table(title, ("workload", "arm", *columns, *(more or {})), tuple(rows), 2, about) if rows else None


def sweeps(report: Report) -> list[Table]:
    """Return each sweep with one row per arm: its maxima, and its means over the steps."""
    made = []
    for group, workloads in report.groups().items():
        if len(workloads) < 2:
            continue
        rows, base = [], _sweep(report, report.baseline, workloads)
        for arm in report.arms:
            found = _sweep(report, arm.name, workloads)
            if not found:
                continue
            rows.append((TableCell(arm.name, detail=arm.label), *(
                TableCell(shown(found[key], unit), found[key],
                          detail=_against(found[key], base.get(key)) if arm.name != report.baseline else "")
                for key, (_, unit) in SWEEP_COLUMNS.items() if key in found)))
        columns = [title for key, (title, _) in SWEEP_COLUMNS.items() if any(key in _sweep(report, arm.name, workloads)
                                                                             for arm in report.arms)]
        made.append(Table(f"{group}: {len(workloads)} steps", ("arm", *columns), tuple(rows),
                          about="Most throughput over the steps; latencies are means over the steps. Small figures are "
                                "against the baseline, without a verdict.",
                          arms=tuple(row[0].text for row in rows)))
    return made


SWEEP_COLUMNS = {
    "max_output_throughput": ("max output, tok/s", "tok/s"),
    "max_request_throughput": ("max requests, req/s", "req/s"),
    "mean_ttft_ms": ("mean TTFT, ms", "ms"),
    "mean_tpot_ms": ("mean TPOT, ms", "ms"),
    "goodput": ("max goodput, req/s", "req/s"),
}


# For the primary metric, as in every verdict: above 1 the arm is better, whichever direction the metric has.
TIMES_BETTER = ("times_better_than_baseline", "times_better_low", "times_better_high")


def summary_rows(report: Report) -> list[dict[str, Any]]:
    """Return the rows of summary.csv, one per arm and group of workloads; ratios have their terms in the name."""
    rows = []
    for group, workloads in report.groups().items():
        for arm in report.arms:
            cells = [cell for workload in workloads if (cell := report.cell(workload.name, arm.name)) is not None]
            verdicts = [verdict for verdict in report.primary_verdicts() if verdict.arm == arm.name
                        and verdict.workload in {workload.name for workload in workloads}]
            one = verdicts[0] if len(verdicts) == 1 else None
            base, found = _sweep(report, report.baseline, workloads), _sweep(report, arm.name, workloads)
            rows.append({
                "experiment": report.name, "workload": group, "steps": len(workloads), "arm": arm.name,
                "engine": arm.engine, "version": arm.version, "label": arm.label,
                "is_baseline": arm.name == report.baseline,
                "status": _status(cells, arm.status), "valid": bool(cells) and all(cell.valid for cell in cells),
                **{key: found.get(key) for key in SWEEP_COLUMNS},
                **{key: _mean(cell.medians.get(key) for cell in cells)
                   for key in dict.fromkeys((*report.metrics, *USUAL)) if key not in SWEEP_COLUMNS},
                "max_output_throughput_over_baseline": _share(found.get("max_output_throughput"),
                                                              base.get("max_output_throughput")),
                "of_limit_percent": _mean(cell.limit_percent for cell in cells),
                "hit_rate": _mean(_hit_rate(cell) for cell in cells),
                "requests": sum(cell.requests for cell in cells), "errors": sum(cell.errors for cell in cells),
                "runs": sum(len(cell.visits) for cell in cells),
                "verdicts": "; ".join(dict.fromkeys(verdict.word for verdict in verdicts)),
                "verdict_metric": report.primary,
                **dict(zip(TIMES_BETTER, one.gains if one and one.gains else (None, None, None), strict=True)),
                "faults": "; ".join(dict.fromkeys(f"{fault.gate}: {fault.reason}" for cell in cells
                                                  for fault in cell.faults if fault.fatal)),
            })
    return rows


def detailed_rows(report: Report) -> list[dict[str, Any]]:
    """Return the rows of detailed.csv: one row per run, with everything that was derived from it."""
    sweep = {workload.name: workload.sweep for workload in report.workloads}
    points = dict.fromkeys(key for point in sweep.values() for key in point)
    metrics = dict.fromkeys(key for visit in report.visits for key in visit.metrics)
    return [{
        "experiment": report.name, "run": visit.key, "index": visit.index, "block": visit.block,
        "workload": visit.workload, "arm": visit.arm,
        **{point: sweep.get(visit.workload, {}).get(point) for point in points},
        "status": visit.status, "reason": visit.reason, "started": visit.started,
        "faults": "; ".join(f"{fault.gate}: {fault.reason}" for fault in visit.faults),
        **{key: visit.metrics.get(key) for key in metrics},
        "client_lag_p99": visit.client.get("lag_p99"), "client_busy": visit.client.get("busy"),
    } for visit in report.visits]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return path


def _sweep(report: Report, arm: str, workloads: Sequence[Workload]) -> dict[str, float]:
    cells = [cell for workload in workloads if (cell := report.cell(workload.name, arm)) is not None]
    columns: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        "max_output_throughput": ("output_throughput", max), "max_request_throughput": ("request_throughput", max),
        "mean_ttft_ms": ("mean_ttft_ms", mean), "mean_tpot_ms": ("mean_tpot_ms", mean),
        "goodput": ("request_goodput", max),
    }
    found = {}
    for name, (key, summarise) in columns.items():
        values = [cell.medians[key] for cell in cells if key in cell.medians]
        if values:
            found[name] = summarise(values)
    return found


def _value(cell: Cell, key: str) -> TableCell:
    if key not in cell.medians:
        return TableCell(NOTHING)
    what, values = metric(key), cell.values.get(key, ())
    spread = f"{shown(min(values), what.unit)} .. {shown(max(values), what.unit)}" if len(values) > 1 else ""
    steady = cell.steady.get(key)
    title = f"steady state: {shown(steady, what.unit)} {what.unit}" if steady is not None else ""
    return TableCell(shown(cell.medians[key], what.unit), cell.medians[key], detail=spread, title=title)


def _verdict_cell(verdict: Verdict | None) -> TableCell:
    if verdict is None:
        return TableCell(NOTHING)
    tone = {"faster": "good", "slower": "bad", "same": "same"}.get(verdict.verdict, "soft")
    gain = verdict.gains[0] if verdict.gains else None
    word = verdict.word if tone != "soft" else ""
    if verdict.verdict == "no verdict":
        return TableCell("no verdict", tone="soft", title=verdict.why)
    return TableCell(gain_text(verdict), gain, word, tone, verdict.verdict)


def _hits(cell: Cell) -> TableCell:
    rate = _hit_rate(cell)
    return TableCell(shown(rate, "%"), rate)


def _hit_rate(cell: Cell) -> float | None:
    if cell.sources and sum(cell.sources.values()):
        return 1 - cell.sources.get("computed", 0) / sum(cell.sources.values())
    return cell.hit_rate


def _against(value: float, base: float | None) -> str:
    return f"{100 * (value / base - 1):+.1f}%" if base else ""


def _share(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _status(cells: Sequence[Cell], otherwise: str) -> str:
    found = list(dict.fromkeys(cell.status for cell in cells))
    return ", ".join(found) if found else otherwise
