"""The table of a report about sharded models: collective operations per step, and the time spent waiting for them."""

from __future__ import annotations

from spillover.lab.report.data import Report
from spillover.lab.report.tables import Table, counters_table

COLUMNS = {  # heading -> (metric, unit)
    "collectives per step": ("ranks_calls_per_step", ""),
    "wait per step, us": ("ranks_wait_us_per_step", ""),
    "wait, share of the run": ("ranks_wait_share", "%"),
    "busiest rank's share of expert rows": ("ranks_busiest_share", "%"),
}


def ranks(report: Report) -> Table | None:
    """Return a row for each workload and arm with several ranks; None if there are none."""
    return counters_table(
        report, "Ranks", COLUMNS, "ranks_calls_per_step",
        "From the server's own counters, medians over runs. Ranks meet to add up their parts, and for logits and "
        "sampled tokens; rank 0 then waits for the exchange and for slower ranks.")
