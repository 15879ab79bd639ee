"""The share of the machine's limit that a run reached, for engines whose model and number format are known.

It is the least time of the work (every computed token once, the weights once per step) over the time in which at least
one request was in flight: a server that waits for requests is not slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spillover.bench.bounds import workload_bound
from spillover.bench.records import RequestRecord, Run
from spillover.bench.target import BenchRequest, Limits
from spillover.lab.engines import EngineSpec

# Returns the machine's limits for an arm's model, None if unknown; implemented by a caller that can read models.
LimitsOf = Callable[[EngineSpec], Limits | None]


@dataclass(frozen=True)
class Reached:
    percent: float | None = None
    bound: str | None = None

    @property
    def text(self) -> str:
        if self.percent is None:
            return "-"
        return f"{self.percent:.0f}% ({self.bound})"

    def to_json(self) -> dict[str, Any]:
        return {"percent": self.percent, "bound": self.bound, "text": self.text}


def reached(run: Run, limits: Limits | None) -> Reached:
    done = run.completed
    if limits is None or not done:
        return Reached()
    requests = [BenchRequest((0,) * record.prompt_tokens, max(1, record.output_tokens)) for record in done]
    least = workload_bound(limits, requests, [_cached(record) for record in done], most_at_once(done))
    return Reached(100 * least.seconds / busy_seconds(done), least.name)


def busy_seconds(records: Sequence[RequestRecord]) -> float:
    """Return the time in which at least one request was in flight, in seconds."""
    total, until = 0.0, float("-inf")
    for record in sorted(records, key=lambda record: record.sent):
        total += max(0.0, record.done - max(until, record.sent))
        until = max(until, record.done)
    return max(total, 1e-9)


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """Return the maximum number of requests in flight; an end counts before a start at the same time."""
    events = sorted([(record.done, -1) for record in records] + [(record.sent, 1) for record in records])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return max(1, most)


def _cached(record: RequestRecord) -> int:
    if record.sources is None:
        return 0
    return min(record.prompt_tokens - 1, sum(count for name, count in record.sources.items() if name != "computed"))
