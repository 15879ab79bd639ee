"""The table of a report about speculation: what arms that speculate drafted, what came of it and what it took."""

from __future__ import annotations

from spillover.bench.serving.speculation_counters import acceptance_by_position
from spillover.lab.report.data import Cell, Report
from spillover.lab.report.metric import shown
from spillover.lab.report.tables import NOTHING, Table, TableCell

SHOWN_POSITIONS = 8
COLUMNS = {  # heading -> (metric, unit)
    "acceptance": ("spec_acceptance_rate", "%"),
    "tokens per pass": ("spec_tokens_per_pass", ""),
    "drafted": ("spec_proposed_tokens", ""),
    "verified": ("spec_verified_tokens", ""),
    "wasted": ("spec_wasted_tokens", ""),
    "drafting, ms": ("spec_draft_ms", "ms"),
    "verifying, ms": ("spec_verify_ms", "ms"),
}


def speculation(report: Report) -> Table | None:
    """Return a row for each workload and arm that drafted; None where none did."""
    rows = []
    for workload in report.workloads:
        for arm in report.arms:
            cell = report.cell(workload.name, arm.name)
            if cell is None or "spec_tokens_per_pass" not in cell.medians:
                continue
            note = "simulated" if cell.medians.get("spec_simulated") else arm.label
            rows.append((TableCell(workload.name), TableCell(arm.name, detail=note),
                         *(_value(cell, key, unit) for key, unit in COLUMNS.values()),
                         TableCell(_by_position(cell))))
    if not rows:
        return None
    return Table("Speculation", ("workload", "arm", *COLUMNS, "accepted up to position 1, 2, ..."), tuple(rows), 2,
                 about="By the servers' own counters, medians over runs. Acceptance is accepted over verified tokens; "
                       "tokens per pass count the one that every pass brings. Drafted tokens may be cut before they "
                       "are verified; the time in verifying is that of whole steps with drafts.")


def _value(cell: Cell, key: str, unit: str) -> TableCell:
    value = cell.medians.get(key)
    return TableCell(NOTHING) if value is None else TableCell(shown(value, unit), value)


def _by_position(cell: Cell) -> str:
    shares = acceptance_by_position(cell.medians)[:SHOWN_POSITIONS]
    return " ".join(shown(share, "%") for share in shares) or NOTHING
