"""Metrics of collective operations between the ranks of a model during a run, from spillover's `ranks_*` counters."""

from __future__ import annotations

from collections.abc import Mapping


def rank_metrics(counters: Mapping[str, float], duration: float) -> dict[str, float]:
    """Return metrics by name; empty for a server with one rank. `counters`: those of one run, as named by
    `server_facts`; `duration`: seconds of the run."""
    calls, steps, seconds = (counters.get(name, 0.0) for name in ("ranks_calls", "engine_steps", "ranks_seconds"))
    if not calls or not steps or duration <= 0:
        return {}
    metrics = {"ranks_calls_per_step": calls / steps, "ranks_wait_us_per_step": 1e6 * seconds / steps,
               "ranks_wait_share": seconds / duration}
    rows = [value for name, value in counters.items() if name.startswith("rank_expert_rows/")]
    if sum(rows):
        metrics["ranks_busiest_share"] = max(rows) / sum(rows)
    return metrics
