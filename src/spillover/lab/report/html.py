"""report.html: one self-contained file. The verdict is in its text; figures are drawn by its own script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spillover.bench.target import PHASES, SOURCES
from spillover.lab.report import wording
from spillover.lab.report.data import Report
from spillover.lab.report.figures import Figure, as_json
from spillover.lab.report.forest import TONES, forest
from spillover.lab.report.metric import metric
from spillover.lab.report.page_template import embedded, render_page
from spillover.lab.report.ranks_table import ranks
from spillover.lab.report.speculation_table import speculation
from spillover.lab.report.tables import accuracy, measured, secondary, sweeps

ARM_COLORS = 8
WIDE = ("curves", "runs", "itl", "machine")
# CSS variables of the parts of a bar; parts from `told` on were not reported by the server.
FILLS = {"split": (*PHASES, "prefill", "decode"), "sources": (*SOURCES, "device")}
REPORTED_PARTS = {"split": len(PHASES), "sources": len(SOURCES)}


def render(report: Report, figures: Sequence[Figure]) -> str:
    colors = arm_colors(report)
    groups = report.groups()
    return render_page(
        "report.html",
        script="charts.js",
        report=report,
        primary=metric(report.primary),
        color=lambda arm: colors.get(arm, "var(--soft)"),
        data=embedded({"baseline": report.baseline, "colors": colors, "fills": FILLS, "told": REPORTED_PARTS,
                       "figures": [as_json(figure) for figure in figures]}),
        facts=wording.top_facts(report),
        warnings=wording.warnings(report),
        counts=[(wording.verdict_word(report, word), count, TONES[word]) for word, count in wording.counts(report)
                if count],
        forest=forest(report),
        method=wording.method(report),
        sweep_tables=[table for table in (accuracy(report), speculation(report), ranks(report), *sweeps(report))
                      if table is not None],
        measured=[{"name": name, "facts": wording.short_facts(workloads[0]),
                   "tables": [measured(report, workload) for workload in workloads]}
                  for name, workloads in groups.items()],
        figures=placed(figures),
        faults=wording.faults(report),
        gates=wording.gates(report),
        not_run=wording.not_installed(report),
        client=wording.client(report),
        not_measured=wording.not_measured(report),
        secondary=secondary(report),
        again=wording.again(report),
        env_prefix=wording.env_prefix,
        workload_facts=wording.workload_facts,
        load_command=lambda workload: wording.load_command(report, workload),
        machine=wording.machine_facts(report),
        definitions=wording.definitions(report),
        document=wording.document(report),
    )


def arm_colors(report: Report) -> dict[str, str]:
    """Return a colour per arm, the same in all figures: the baseline is grey, others by their order."""
    others = [arm.name for arm in report.arms if arm.name != report.baseline]
    colors = {name: f"var(--arm-{index % ARM_COLORS})" for index, name in enumerate(others)}
    return {**colors, report.baseline: "var(--base)"}


def placed(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Place narrow figures in pairs; one without a neighbour gets the full width."""
    rows: list[list[Figure]] = []
    for figure in figures:
        if rows and len(rows[-1]) == 1 and not {figure.key, rows[-1][0].key} & set(WIDE):
            rows[-1].append(figure)
        else:
            rows.append([figure])
    return [{"key": figure.key, "title": figure.title, "about": figure.about, "wide": len(row) == 1}
            for row in rows for figure in row]
