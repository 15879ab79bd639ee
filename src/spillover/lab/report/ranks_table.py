"""The table of a report about sharded models: collective operations per step, and the time spent waiting for them."""

from __future__ import annotations

from spillover.lab.report.data import Report
from spillover.lab.report.tables import Table, counters_table

COLUMNS = {  # heading -> (metric, unit)
    "met per step": ("ranks_calls_per_step", ""),
    "waited per step, us": ("ranks_wait_us_per_step", ""),
    "of the run": ("ranks_wait_share", "%"),
    "busiest rank's share of expert rows": ("ranks_busiest_share", "%"),
}


def ranks(report: Report) -> Table | None:
    """Return a row for each workload and arm with several ranks; None if there are none."""
    return counters_table(
        report, "Ranks", COLUMNS, "ranks_calls_per_step",
        "By the server's own counters, medians over runs. Ranks meet for sums of their parts, for logits and for "
        "sampled tokens; what rank 0 waits for then is the exchange, and slower ranks.")
