"""Names, units, directions and definitions of metrics in a report.

Keys are those of `vllm bench serve`'s JSON (`mean_ttft_ms`, `p99_itl_ms`, `output_throughput`); a key without a
definition is shown by its own name rather than left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spillover.lab.verdict import better

STATISTICS = {"mean": "mean", "median": "median", "std": "standard deviation of"}
LATENCIES = {
    "ttft": ("TTFT", "time from sending a request to the first chunk that carries text or token ids"),
    "ttft_scheduled": ("TTFT from schedule", "as TTFT, but from when the request should have been sent: waiting in "
                                             "the client counts"),
    "tpot": ("TPOT", "(last token - first token) / (tokens - 1), one value per request"),
    "itl": ("ITL", "gaps between tokens, pooled over requests; a chunk of k tokens counts as k gaps of 1/k"),
    "e2el": ("E2EL", "time from sending a request to its last token"),
}
RATES = {
    "request_throughput": ("requests", "req/s", "finished requests per second"),
    "request_goodput": ("goodput", "req/s", "requests per second that met every objective"),
    "output_throughput": ("output", "tok/s", "output tokens per second"),
    "total_token_throughput": ("in + out", "tok/s", "prompt and output tokens per second"),
    "max_output_tokens_per_s": ("peak output", "tok/s", "output tokens in the best second"),
}
OTHERS = {
    "duration": ("duration", "s", "time from sending the first request to the end of the last"),
    "max_concurrent_requests": ("peak concurrency", "", "maximum number of requests in progress at once"),
    "hit_rate": ("prefix hits", "%", "share of prompt tokens that were not computed"),
    "of_limit": ("of limit", "%", "the shortest time that the machine's measured rates allow, over the time it took"),
}


@dataclass(frozen=True)
class Metric:
    key: str
    label: str
    unit: str
    higher_is_better: bool
    about: str = ""

    @property
    def title(self) -> str:
        return f"{self.label}, {self.unit}" if self.unit else self.label


def metric(key: str) -> Metric:
    if key in RATES:
        label, unit, about = RATES[key]
        return Metric(key, label, unit, True, about)
    if key in OTHERS:
        label, unit, about = OTHERS[key]
        return Metric(key, label, unit, better(key) == "higher", about)
    found = re.fullmatch(r"(mean|median|std|p\d+(?:\.\d+)?)_(\w+)_ms", key)
    if found is not None and found[2] in LATENCIES:
        label, about = LATENCIES[found[2]]
        return Metric(key, f"{STATISTICS.get(found[1], found[1])} {label}", "ms", False, about)
    unit = "ms" if key.endswith("_ms") else ""
    return Metric(key, key.removesuffix("_ms").replace("_", " "), unit, better(key) == "higher")


def shown(value: float | None, unit: str) -> str:
    """Format a value for display: three or four digits, with thousands separators."""
    if value is None or value != value:
        return "-"
    if unit == "%":
        return f"{100 * value:.1f}%" if 0 < abs(value) < 0.1 else f"{100 * value:.0f}%"
    size = abs(value)
    if size >= 100 or (value == int(value) and size >= 1):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"
