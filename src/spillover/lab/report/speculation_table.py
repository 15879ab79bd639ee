"""The table of a report about speculation: the draft tokens of each arm, their acceptance and the time they took."""

from __future__ import annotations

from spillover.bench.serving.speculation_counters import acceptance_by_position
from spillover.lab.report.data import Cell, Report
from spillover.lab.report.metric import shown
from spillover.lab.report.tables import NOTHING, Table, counters_table

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
    """Return a row for each workload and arm that drafted; None if none did."""
    return counters_table(
        report, "Speculation", COLUMNS, "spec_tokens_per_pass",
        "From the servers' counters, medians over runs. Acceptance is accepted over verified tokens; tokens per pass "
        "include the one that every pass yields. Drafted tokens may be cut before they are verified; the time in "
        "verifying is that of whole steps with drafts.",
        note=lambda cell: "simulated" if cell.medians.get("spec_simulated") else "",
        more={"accepted up to position 1, 2, ...": _by_position})


def _by_position(cell: Cell) -> str:
    shares = acceptance_by_position(cell.medians)[:SHOWN_POSITIONS]
    return " ".join(shown(share, "%") for share in shares) or NOTHING
