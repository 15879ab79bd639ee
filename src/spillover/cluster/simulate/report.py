"""The metrics of a simulation, with the names of the benchmarks, and the assumptions behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spillover.cluster.simulate.costs import Measured
from spillover.cluster.simulate.run import FleetSettings, Outcome

PERCENTILES = (50, 95, 99)


def summary(outcome: Outcome, hour_cost: float | None = None) -> dict[str, Any]:
    """Return a simulation's metrics in seconds and shares of 1. `hour_cost` is the cost of a replica per hour."""
    settings = outcome.settings
    first = np.asarray(outcome.first_token)
    first = first[~np.isnan(first)]
    gaps, seconds = np.asarray(outcome.gaps), outcome.seconds
    tokens, replicas = outcome.prompt_tokens + outcome.output_tokens, settings.replicas + settings.decode_replicas
    made: dict[str, Any] = {
        "replicas": settings.replicas, "decode_replicas": settings.decode_replicas, "policy": settings.policy,
        "requests": len(first), "refused": outcome.refused, "seconds": seconds,
        "requests_per_second": len(first) / seconds if seconds else 0.0,
        "output_tokens_per_second": outcome.output_tokens / seconds if seconds else 0.0,
        "total_tokens_per_second": tokens / seconds if seconds else 0.0,
        "hit_rate": (outcome.device_tokens + outcome.host_tokens) / max(outcome.prompt_tokens, 1),
        "host_hit_rate": outcome.host_tokens / max(outcome.prompt_tokens, 1)}
    for name, values in (("ttft", first), ("itl", gaps)):
        made[f"{name}_mean"] = float(values.mean()) if len(values) else 0.0
        made |= {f"{name}_p{rank}": float(np.percentile(values, rank)) if len(values) else 0.0 for rank in PERCENTILES}
    made |= {"busy": sum(outcome.busy_seconds) / (replicas * seconds) if seconds else 0.0,
             "steps": outcome.steps, "preemptions": outcome.preemptions, "served": outcome.served}
    if hour_cost is not None:
        spent = replicas * hour_cost * seconds / 3600
        made["cost_per_million_tokens"] = spent / max(tokens, 1) * 1e6
        made["cost_per_million_output_tokens"] = spent / max(outcome.output_tokens, 1) * 1e6
    return made


def assumptions(measured: Measured, settings: Sequence[FleetSettings]) -> list[str]:
    """Return the assumptions behind the metrics, one sentence each."""
    first, fit = settings[0], measured.fit
    lines = [f"Step costs: {measured.source}" + (f", {len(fit.points)} measured steps fitted within "
             f"{fit.mean_error:.1%} on average, {fit.worst_error:.1%} at most" if fit.points else ""),
             "Replicas batch as the engine does: decodes first, chunked prefill, "
             f"{first.replica.max_num_batched_tokens:,} tokens and {first.replica.max_num_seqs} requests a step; no "
             "speculation, no LoRA",
             f"KV: {first.replica.num_blocks:,} blocks of {first.replica.block_size} tokens a replica, LRU"
             + (f"; {first.replica.host_blocks:,} in host memory, {first.replica.host_block_seconds * 1e3:g} ms to "
                "bring one back, during which its prompt is not computed" if first.replica.host_blocks else ""),
             "The router's decisions are the real code's; it knows "
             + ("what each replica holds, at once" if first.kv_events else "only what it sent where"),
             f"A request takes {(first.request_seconds + first.router_seconds) * 1e3:.2f} ms outside of steps"
             + ("" if first.request_seconds + first.router_seconds else " (not measured)"),
             "Requests come at the trace's times, whether earlier ones have finished or not; answers have the trace's "
             "lengths, and no prompt finds an answer's KV again"]
    split = next((each for each in settings if each.decode_replicas), None)
    if split is not None:
        lines.append("Split: the first token comes from where the prompt is computed; its KV travels chunk by chunk at "
                     f"{split.transfer_token_seconds * 1e6:.3g} us a token over one link a replica; the replica "
                     "with the fewest requests decodes")
    return lines
