"""Latency of one batch, run alone and over again. vLLM's flags and JSON keys, and prefill apart from decode.

Every iteration runs the batch twice, on prompts never seen before: once for a single token, which is the prefill (and
the time to first token), and once for the whole output. Decode is the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spillover.bench.bounds import Achieved, achieved
from spillover.bench.statistics import Interval, median_interval, percentiles
from spillover.bench.target import BenchRequest, Bound, Generates, Limits
from spillover.bench.workloads import Vocabulary


@dataclass(frozen=True)
class LatencyResult:
    batch_size: int
    input_len: int
    output_len: int
    latencies: tuple[float, ...]  # seconds of the whole batch, one an iteration
    first_tokens: tuple[float, ...]  # seconds of the one-token runs
    prefill: Achieved | None
    decode: Achieved | None  # one step; None also where there is nothing to decode

    @property
    def latency(self) -> Interval:
        return median_interval(self.latencies)

    @property
    def first_token(self) -> Interval:
        return median_interval(self.first_tokens)

    @property
    def token_time(self) -> float | None:
        """Seconds a decode step, from the medians."""
        if self.output_len == 1:
            return None
        return (self.latency.median - self.first_token.median) / (self.output_len - 1)

    def as_dict(self) -> dict[str, Any]:
        step = self.token_time
        return {
            # vLLM's keys
            "avg_latency": float(np.mean(self.latencies)),
            "std_latency": float(np.std(self.latencies)),
            "latencies": list(self.latencies),
            "percentiles": {str(rank): value for rank, value in percentiles(self.latencies).items()},
            # and ours
            "batch_size": self.batch_size,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "latency_interval": self.latency.as_dict(),
            "first_token_latencies": list(self.first_tokens),
            "ttft_interval": self.first_token.as_dict(),
            "prefill_tokens_per_second": self.batch_size * self.input_len / self.first_token.median,
            "decode_tokens_per_second": None if step is None else self.batch_size / step,
            "prefill": None if self.prefill is None else self.prefill.as_dict(),
            "decode_step": None if self.decode is None else self.decode.as_dict(),
        }


def measure(target: Generates, vocabulary: Vocabulary, batch_size: int, input_len: int,
            output_len: int, num_iters: int, num_iters_warmup: int, seed: int = 0,
            on_iteration: Callable[[], None] = lambda: None) -> LatencyResult:
    rng = np.random.default_rng([seed, batch_size, input_len])

    def timed(length: int) -> float:
        batch = [BenchRequest(vocabulary.draw(rng, input_len), length) for _ in range(batch_size)]
        start = time.perf_counter()
        target.generate(batch)
        return time.perf_counter() - start

    for _ in range(num_iters_warmup):
        timed(output_len)
        on_iteration()
    latencies, first_tokens = [], []
    for _ in range(num_iters):
        first_tokens.append(timed(1))
        latencies.append(timed(output_len))
        on_iteration()
    result = LatencyResult(batch_size, input_len, output_len, tuple(latencies), tuple(first_tokens), None, None)
    limits = target.limits
    if limits is None:
        return result
    prefill = achieved(result.first_token.median, limits.step([(input_len, 0)] * batch_size), limits)
    decode = None
    # With noise the difference of two medians can come out at or below zero: then there is no rate to print.
    if result.token_time is not None and result.token_time > 0:
        decode = achieved(result.token_time, _mean_step(limits, batch_size, input_len, output_len), limits)
    return replace(result, prefill=prefill, decode=decode)


def _mean_step(limits: Limits, batch_size: int, input_len: int, output_len: int) -> Bound:
    """Bytes and FLOPs of a step grow linearly with the context, so the step at the mean context is the mean step."""
    return limits.step([(1, input_len + output_len // 2)] * batch_size)
