"""Metrics of a run as one flat table of numbers, named as in the JSON of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spillover.bench.records import Run
from spillover.bench.serving.serving_metrics import measure

LATENCIES = ("ttft", "ttft_scheduled", "tpot", "itl", "e2el")
RANKS = (50.0, 90.0, 95.0, 99.0)


def run_metrics(run: Run, slo: Mapping[str, float] | None = None,
                window: tuple[float, float] | None = None) -> dict[str, float | None]:
    """Compute the metrics of a run. `slo`: milliseconds by latency. `window`: None for the whole run."""
    found = measure(run, {name: limit / 1e3 for name, limit in (slo or {}).items()} or None, window, RANKS)
    metrics: dict[str, float | None] = {
        "duration": found.duration, "completed": found.completed, "failed": found.failed,
        "total_input_tokens": found.prompt_tokens, "total_output_tokens": found.output_tokens,
        "request_throughput": found.request_throughput, "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_token_throughput, "request_goodput": found.goodput,
        "slo_attainment": found.attainment, "max_output_tokens_per_s": found.peak_output_throughput,
        "max_concurrent_requests": found.peak_concurrency, "mean_concurrent_requests": found.mean_concurrency,
    }
    for name in LATENCIES:
        spread = getattr(found, name)
        values = {"mean": spread.mean, "median": spread.median, "std": spread.std,
                  **{f"p{rank:g}": value for rank, value in spread.percentiles.items()}}
        metrics |= {f"{statistic}_{name}_ms": None if math.isnan(value) else 1e3 * value
                    for statistic, value in values.items()}
    return metrics


def metric_names(slo: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Return the metrics that an experiment may name."""
    from spillover.bench.records import ClientHealth

    empty = run_metrics(Run((), 0.0, 1.0, ClientHealth(), (0.0, 1.0)), slo)
    server_metrics = ("hit_rate", "queue_ms", "restore_ms", "prefill_ms", "decode_ms")
    return (*(name for name in empty if slo or name not in ("request_goodput", "slo_attainment")), *server_metrics)
