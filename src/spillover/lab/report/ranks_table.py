"""The table of a report about sharded models: how often ranks met in a step, and how long they waited."""

from __future__ import annotations

from spillover.lab.report.data import Report
from spillover.lab.report.metric import shown
from spillover.lab.report.tables import NOTHING, Table, TableCell

COLUMNS = {  # heading -> (metric, unit)
    "met per step": ("ranks_calls_per_step", ""),
    "waited per step, us": ("ranks_wait_us_per_step", ""),
    "of the run": ("ranks_wait_share", "%"),
    "busiest rank's share of expert rows": ("ranks_busiest_share", "%"),
}


def ranks(report: Report) -> Table | None:
    """Return a row for each workload and arm with several ranks; None where none has."""
    rows = []
    for workload in report.workloads:
        for arm in report.arms:
            cell = report.cell(workload.name, arm.name)
            if cell is None or "ranks_calls_per_step" not in cell.medians:
                continue
            values = [(cell.medians.get(key), unit) for key, unit in COLUMNS.values()]
            rows.append((TableCell(workload.name), TableCell(arm.name, detail=arm.label),
                         *(TableCell(NOTHING) if value is None else TableCell(shown(value, unit), value)
                           for value, unit in values)))
    if not rows:
        return None
    return Table("Ranks", ("workload", "arm", *COLUMNS), tuple(rows), 2,
                 about="By the server's own counters, medians over runs. Ranks meet for sums of their parts, for "
                       "logits and for sampled tokens; what rank 0 waits for then is the exchange, and slower ranks.")
