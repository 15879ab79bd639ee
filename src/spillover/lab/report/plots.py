"""The figures as PNG files, for places where scripts cannot run. Drawn from the same data as on the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.lab.report.data import Report
from spillover.lab.report.figures import Figure, LineFigure, Panel, StackFigure
from spillover.lab.report.metric import metric
from spillover.lab.report.tables import gain_text
from spillover.lab.report.wording import judged

BASE = "#55554f"
COLORS = ("#0d9488", "#3b6fd4", "#c2780c", "#8b5cf6", "#c0437a", "#5f8a1f", "#b3492e", "#0e7fae")
PARTS = {"split": ("#a19a92", "#c2780c", "#3b6fd4", "#0d9488", "#9db7ea", "#86cac3"),
         "sources": ("#a19a92", "#0d9488", "#3b6fd4", "#0e9fc4", "#8b5cf6", "#c0437a", "#86cac3")}
TONES = {"faster": "#0b7a52", "slower": "#b3261e", "same": "#2f5fb3"}
STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#ececea",
         "axes.edgecolor": "#c9c9c4", "axes.labelcolor": "#5f5f5a", "xtick.color": "#5f5f5a", "ytick.color": "#5f5f5a",
         "text.color": "#1a1a19", "axes.axisbelow": True, "font.size": 9, "axes.titlesize": 10,
         "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False, "figure.dpi": 120,
         "figure.facecolor": "white"}


def write_plots(folder: Path, report: Report, figures: Sequence[Figure]) -> tuple[Path, ...]:
    """Write plots: benchmark_results.png has the verdicts and medians; plots/ has one file per figure."""
    try:
        import matplotlib
    except ImportError as error:
        raise SpilloverError("drawing plots needs the lab extra: pip install 'spillover[lab]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    (folder / "plots").mkdir(exist_ok=True)
    written = []
    with pyplot.rc_context(STYLE):
        overview = _overview(pyplot, report)
        overview.savefig(folder / "benchmark_results.png")
        pyplot.close(overview)
        written.append(folder / "benchmark_results.png")
        for figure in figures:
            drawn = _lines(pyplot, report, figure) if isinstance(figure, LineFigure) else _stack(pyplot, figure)
            path = folder / "plots" / f"{figure.key}.png"
            drawn.savefig(path)
            pyplot.close(drawn)
            written.append(path)
    return tuple(written)


def _color(report: Report, arm: str) -> str:
    others = [one.name for one in report.arms if one.name != report.baseline]
    return BASE if arm == report.baseline else COLORS[others.index(arm) % len(COLORS)]


def _overview(pyplot: Any, report: Report) -> Any:
    """Return an overview: verdicts as intervals around 1x on the left, medians of the first metrics next to them."""
    verdicts = judged(report)[::-1]
    keys = [key for key in dict.fromkeys((*report.metrics, "median_ttft_ms", "median_tpot_ms"))
            if any(key in cell.medians for cell in report.cells)][:3]
    rows = max(len(verdicts) * 1.4, sum(bool(cell.medians) for cell in report.cells), 4)
    figure, axes = pyplot.subplots(1, 1 + len(keys), figsize=(5.0 + 3.0 * len(keys), 1.0 + 0.24 * rows), squeeze=False,
                                   layout="constrained", gridspec_kw={"width_ratios": [1.6] + [1.0] * len(keys)})
    left = axes[0][0]
    left.set_xscale("log")
    for place, verdict in enumerate(verdicts):
        tone = TONES.get(verdict.verdict, "#7a7a74")
        if verdict.gains is not None and verdict.verdict != "no verdict":
            gain, low, high = verdict.gains
            left.plot([low, high], [place, place], color=tone, linewidth=5, alpha=0.4, solid_capstyle="round")
            left.plot([gain], [place], "o", color=tone, markersize=6)
    left.axvline(1, color="#5f5f5a", linewidth=1)
    left.set_yticks(range(len(verdicts)), [f"{_row_name(report, verdict.workload, verdict.arm)}\n{verdict.word}"
                                           + ("" if verdict.verdict == "no verdict" else f", {gain_text(verdict)}")
                                           for verdict in verdicts], fontsize=7)
    left.set_ylim(-0.7, len(verdicts) - 0.3)
    low, high = left.get_xlim()
    ticks = [tick for tick in (0.01, 0.1, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 10, 100) if low <= tick <= high]
    left.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    left.minorticks_off()
    left.set_xlabel(f"times better than {report.baseline}: {metric(report.primary).label}")
    left.set_title(f"{report.name}: verdicts")
    for place, (axis, key) in enumerate(zip(axes[0][1:], keys, strict=True)):
        cells = [cell for cell in report.cells if key in cell.medians][::-1]
        axis.barh(range(len(cells)), [cell.medians[key] for cell in cells],
                  color=[_color(report, cell.arm) for cell in cells], height=0.65)
        axis.set_yticks(range(len(cells)), [_row_name(report, cell.workload, cell.arm) if place == 0 else ""
                                               for cell in cells], fontsize=7)
        axis.set_title(metric(key).title)
        axis.grid(axis="y", visible=False)
    return figure


def _row_name(report: Report, workload: str, arm: str) -> str:
    return arm if len(report.workloads) == 1 else f"{workload} · {arm}"


def _lines(pyplot: Any, report: Report, figure: LineFigure) -> Any:
    """Draw a figure, with at most its first eight panels; the page shows all."""
    panels = figure.panels[:8]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (5.4 * columns, 3.0 * rows)
    drawn, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for index, panel in enumerate(panels):
        _panel(axes[index // columns][index % columns], report, figure, panel)
    for index in range(len(panels), rows * columns):
        axes[index // columns][index % columns].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels) or 1))
    drawn.suptitle(figure.title, fontweight="bold", x=0.01, ha="left")
    return drawn


def _panel(axis: Any, report: Report, figure: LineFigure, panel: Panel) -> None:
    factor, suffix = _scaled(panel)
    for line in panel.lines:
        color = _color(report, line.arm)
        x, y = [point[0] for point in line.points], [point[1] * factor for point in line.points]
        dashes = "--" if line.arm == report.baseline else "-"
        if line.upper:
            axis.fill_between(x, y, [value * factor for value in line.upper], color=color, alpha=0.13, linewidth=0)
        if figure.style == "dots":
            filled = [color if not (line.hollow and line.hollow[index]) else "white" for index in range(len(x))]
            axis.scatter(x, y, c=filled, edgecolors=color, s=26, linewidths=1.3, label=line.arm)
        else:
            axis.plot(x, y, dashes, color=color, linewidth=1.6, label=line.arm,
                      marker="o" if figure.style == "curve" else None, markersize=4.5,
                      drawstyle="steps-post" if figure.style == "steps" else "default")
    if panel.x.log:
        axis.set_xscale("log")
    if figure.style not in ("dots",):
        axis.set_ylim(bottom=0)
    axis.set_xlabel(f"{panel.x.label}, {panel.x.unit}" if panel.x.unit else panel.x.label)
    axis.set_ylabel(f"{panel.y.label}{suffix}")
    axis.set_title(" · ".join(part for part in (panel.workload, panel.choice) if part), fontsize=9)


def _scaled(panel: Panel) -> tuple[float, str]:
    if panel.y.unit == "B":
        return 1 / 1024**3, ", GiB"
    if panel.y.unit == "B/s":
        return 1e-6, ", MB/s"
    return (100, ", %") if panel.y.unit == "%" else (1, f", {panel.y.unit}" if panel.y.unit else "")


def _stack(pyplot: Any, figure: StackFigure) -> Any:
    drawn, axis = pyplot.subplots(figsize=(8.5, 1.3 + 0.27 * len(figure.rows)), layout="constrained")
    rows = figure.rows[::-1]
    factor, start = (100 if figure.unit == "%" else 1), [0.0] * len(rows)
    for index, part in enumerate(figure.parts):
        widths = [row.parts[index] * factor for row in rows]
        if any(widths):
            axis.barh(range(len(rows)), widths, left=start, height=0.68, label=part, color=PARTS[figure.key][index])
            start = [before + width for before, width in zip(start, widths, strict=True)]
    several = len({row.workload for row in rows}) > 1
    names = [f"{row.workload} · {row.arm}" if several else row.arm for row in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.set_xlabel("share of prompt tokens, %" if figure.share else f"mean over requests, {figure.unit}")
    axis.grid(axis="y", visible=False)
    axis.set_title(figure.title)
    drawn.legend(loc="outside lower center", ncols=6)
    return drawn
