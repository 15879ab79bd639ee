"""All metrics of a served run, derived from its records alone.

Definitions. Times are in seconds; a failed request is counted, but not part of any latency or throughput.

- TTFT: from when the request was *sent* to the first chunk that carries text or token ids. `ttft_scheduled` counts from
  when it should have been sent, and so includes waiting in the client (no coordinated omission).
- TPOT: (last - first) / (n - 1), one value per request, of requests with n > 1 tokens.
- ITL: gaps between tokens, pooled over all requests; a chunk of k tokens gives k gaps of gap / k.
- E2EL: from sent to the last chunk.
- Goodput: requests per second that meet every objective; a request of one token has a TPOT of 0.
- Throughput: of the whole run from the first request sent to the last answer finished; of a window what arrived in it.
- Peak output throughput: most tokens in one second, seconds counted from the first request sent.

The steady-state window begins once a tenth of the sending time has passed *and* at least as many requests run as at the
median of that time; it ends when the last request was due (closed loop: sent), after which the load falls. A burst has
no such state: its window is the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spillover.bench.records import RequestRecord, Run

RANKS = (50.0, 90.0, 95.0, 99.0)
OBJECTIVES = ("ttft", "tpot", "e2el")
Window = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Summary of a metric over its samples."""

    mean: float
    median: float
    std: float
    count: int
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, values: Sequence[float] | npt.NDArray[np.float64], ranks: Sequence[float] = RANKS) -> Spread:
        data = np.asarray(values, dtype=float)
        if data.size == 0:
            return cls(math.nan, math.nan, math.nan, 0, dict.fromkeys(ranks, math.nan))
        found = np.percentile(data, list(ranks)).tolist() if ranks else []
        return cls(float(data.mean()), float(np.median(data)), float(data.std()), int(data.size),
                   dict(zip(ranks, found, strict=True)))

    def to_json(self) -> dict[str, Any]:
        numbers = {"mean": self.mean, "median": self.median, "std": self.std,
                   **{f"p{rank:g}": value for rank, value in self.percentiles.items()}}
        return {"count": self.count, **{name: None if math.isnan(value) else value for name, value in numbers.items()}}


@dataclass(frozen=True)
class ServingMetrics:
    """The metrics of a whole run, or of a window of it."""

    window: Window
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    peak_concurrency: int
    mean_concurrency: float
    goodput: float | None  # requests per second; None without objectives
    attainment: float | None  # share of all requests, including failed ones, that meet every objective
    ttft: Spread
    ttft_scheduled: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread

    @property
    def duration(self) -> float:
        return self.window[1] - self.window[0]

    def to_json(self) -> dict[str, Any]:
        plain = ("completed", "failed", "prompt_tokens", "output_tokens", "request_throughput", "output_throughput",
                 "total_token_throughput", "peak_output_throughput", "peak_concurrency", "mean_concurrency", "goodput",
                 "attainment", "duration")
        spreads = ("ttft", "ttft_scheduled", "tpot", "itl", "e2el")
        return {"window": list(self.window), **{name: getattr(self, name) for name in plain},
                **{name: getattr(self, name).to_json() for name in spreads}}


def measure(run: Run, goodput: Mapping[str, float] | None = None, window: Window | None = None,
            ranks: Sequence[float] = RANKS) -> ServingMetrics:
    """Measure a run. `goodput`: objectives in seconds by metric (ttft, tpot, e2el). `window`: use latencies of requests
    sent within it and throughput of tokens that arrived within it; None for the whole run."""
    completed = [record for record in run.records if record.ok]
    start = min((record.sent for record in run.records), default=0.0)
    span = window or (start, start + run.duration)
    # Events at the end of a window belong to the next one; a window that ends with the run includes its last answer.
    final = max((record.done for record in run.records), default=0.0)
    before = math.inf if span[1] >= final else span[1]
    inside = [record for record in completed if window is None or span[0] <= record.sent < before]
    ended = [record for record in completed if window is None or span[0] <= record.done < before]
    failed = [record for record in run.records
              if not record.ok and (window is None or span[0] <= record.sent < before)]
    seconds = max(1e-9, span[1] - span[0])
    tokens = token_times(completed)
    within = tokens[(tokens[:, 0] >= span[0]) & (tokens[:, 0] < before)] if window is not None else tokens
    output = float(within[:, 1].sum())
    prompts = sum(record.prompt_tokens for record in ended)
    good = sum(meets(record, goodput) for record in inside) if goodput else None
    levels = concurrency(run.records)
    return ServingMetrics(
        window=span,
        completed=len(ended),
        failed=len(failed),
        prompt_tokens=prompts,
        output_tokens=int(output) if window is not None else sum(record.output_tokens for record in completed),
        request_throughput=len(ended) / seconds,
        output_throughput=output / seconds,
        total_token_throughput=(output + prompts) / seconds,
        peak_output_throughput=_peak(within, span[0]),
        peak_concurrency=int(levels[:, 1].max()) if len(levels) else 0,
        mean_concurrency=mean_level(levels, span),
        goodput=None if good is None else good / seconds,
        attainment=None if good is None else good / max(1, len(inside) + len(failed)),
        ttft=Spread.of([ttft(record) for record in inside], ranks),
        ttft_scheduled=Spread.of([record.chunks[0][0] - record.scheduled for record in inside], ranks),
        tpot=Spread.of([value for record in inside if (value := tpot(record)) is not None], ranks),
        itl=Spread.of(np.concatenate([gaps(record) for record in inside] or [np.empty(0)]), ranks),
        e2el=Spread.of([e2el(record) for record in inside], ranks),
    )


def ttft(record: RequestRecord) -> float:
    return record.chunks[0][0] - record.sent


def e2el(record: RequestRecord) -> float:
    return record.chunks[-1][0] - record.sent


def tpot(record: RequestRecord) -> float | None:
    """Return the mean seconds per output token after the first; None for an answer of one token."""
    if record.output_tokens < 2:
        return None
    return (record.chunks[-1][0] - record.chunks[0][0]) / (record.output_tokens - 1)


def gaps(record: RequestRecord) -> npt.NDArray[np.float64]:
    """Return the inter-token latencies. Tokens of the first chunk have no gap between them."""
    times = np.array([at for at, _ in record.chunks])
    counts = np.array([count for _, count in record.chunks])
    with_tokens = counts > 0
    times, counts = times[with_tokens], counts[with_tokens]
    if not len(times):
        return np.empty(0)
    later = np.repeat(np.diff(times) / counts[1:], counts[1:])
    return np.concatenate([np.zeros(counts[0] - 1), later])


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    values = {"ttft": ttft(record), "tpot": tpot(record) or 0.0, "e2el": e2el(record)}
    return all(values[name] <= limit for name, limit in objectives.items())


def token_times(records: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """Return (time, tokens) of every chunk of these requests, one per row."""
    return np.array([chunk for record in records for chunk in record.chunks], dtype=float).reshape(-1, 2)


def concurrency(records: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """Return (time, number of requests in flight from then on), one row per change."""
    edges = np.array([(record.sent, 1) for record in records] + [(record.done, -1) for record in records],
                     dtype=float).reshape(-1, 2)
    edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    return np.column_stack([edges[:, 0], np.cumsum(edges[:, 1])])


def mean_level(levels: npt.NDArray[np.float64], window: Window) -> float:
    """Return the mean of a step function over time."""
    if not len(levels) or window[1] <= window[0]:
        return 0.0
    times = np.clip(np.append(levels[:, 0], window[1]), *window)
    return float((np.diff(times) * levels[:, 1]).sum() / (window[1] - window[0]))


def steady_window(records: Sequence[RequestRecord], closed: bool) -> Window:
    """Return the time in which load neither rises nor falls. `closed`: it ends when the last request is sent."""
    if not records:
        return (0.0, 0.0)
    first, last = min(record.sent for record in records), max(record.done for record in records)
    end = max(record.sent if closed else record.scheduled for record in records)
    begin = first + (end - first) / 10
    levels = concurrency(records)
    at = np.linspace(begin, end, 501)
    running = levels[np.searchsorted(levels[:, 0], at, side="right") - 1, 1]
    reached = at[running >= np.median(running)]
    begin = max(begin, float(reached[0]))
    return (begin, end) if end - begin >= (last - first) / 10 else (first, last)


def _peak(tokens: npt.NDArray[np.float64], start: float) -> float:
    if not len(tokens):
        return 0.0
    return float(np.bincount(np.maximum(0, (tokens[:, 0] - start)).astype(int), weights=tokens[:, 1]).max())
