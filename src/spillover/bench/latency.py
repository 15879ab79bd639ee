"""Latency of a single batch, repeated, with vLLM's flags and JSON keys; prefill and decode are reported separately.

Both phases come from the same run: prefill ends with the first token of the last request, and decode is the rest of
that request's time. Each iteration is compared with rates that are measured right before and after it, so that drift in
the machine's speed changes the work and its limit alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spillover.bench.bounds import Achieved, achieved
from spillover.bench.statistics import Interval, median_interval, percentiles
from spillover.bench.target import BenchRequest, Bound, Generates, Limits
from spillover.bench.workloads.workloads import Vocabulary


@dataclass(frozen=True)
class LatencyResult:
    batch_size: int
    input_len: int
    output_len: int
    latencies: tuple[float, ...]  # seconds of the whole batch, one value per iteration
    first_tokens: tuple[float, ...]  # seconds to the first token of the last request, one value per iteration
    token_times: tuple[float, ...] = ()  # seconds per decode step, one per iteration; empty if one token is sampled
    prefill: Achieved | None = None  # the iteration with the median share of the limit
    decode: Achieved | None = None  # the same for one decode step

    @property
    def latency(self) -> Interval:
        return median_interval(self.latencies)

    @property
    def first_token(self) -> Interval:
        return median_interval(self.first_tokens)

    @property
    def token_time(self) -> Interval | None:
        return median_interval(self.token_times) if self.token_times else None

    def as_dict(self) -> dict[str, Any]:
        step = self.token_time
        return {
            # keys that vLLM writes too
            "avg_latency": float(np.mean(self.latencies)),
            "std_latency": float(np.std(self.latencies)),
            "latencies": list(self.latencies),
            "percentiles": {str(rank): value for rank, value in percentiles(self.latencies).items()},
            # keys of our own
            "batch_size": self.batch_size,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "latency_interval": self.latency.as_dict(),
            "first_token_latencies": list(self.first_tokens),
            "ttft_interval": self.first_token.as_dict(),
            "prefill_tokens_per_second": self.batch_size * self.input_len / self.first_token.median,
            "token_times": list(self.token_times),
            "decode_tokens_per_second": None if step is None else self.batch_size / step.median,
            "prefill": None if self.prefill is None else self.prefill.as_dict(),
            "decode_step": None if self.decode is None else self.decode.as_dict(),
        }


def measure(target: Generates, vocabulary: Vocabulary, batch_size: int, input_len: int,
            output_len: int, num_iters: int, num_iters_warmup: int, seed: int = 0,
            on_iteration: Callable[[], None] = lambda: None) -> LatencyResult:
    rng = np.random.default_rng([seed, batch_size, input_len])

    def run() -> tuple[float, float, float]:
        """Return the seconds of the whole batch, to the last first token, and per decode step."""
        batch = [BenchRequest(vocabulary.draw(rng, input_len), output_len) for _ in range(batch_size)]
        start = time.perf_counter()
        completions = target.generate(batch)
        whole = time.perf_counter() - start
        last = max(completions, key=lambda completion: completion.first_token)
        return whole, last.first_token, last.decode / max(1, output_len - 1)

    for _ in range(num_iters_warmup):
        run()
        on_iteration()
    runs: list[tuple[float, float, float]] = []
    prefills: list[Achieved] = []
    decodes: list[Achieved] = []
    limits = target.limits.again() if target.limits is not None else None
    for _ in range(num_iters):
        runs.append(run())
        if limits is not None:
            after = limits.again()
            held, limits = limits.mean(after), after
            _, first_token, token_time = runs[-1]
            prefills.append(achieved(first_token, held.step([(input_len, 0)] * batch_size), held))
            if output_len > 1:
                decodes.append(achieved(token_time, _mean_step(held, batch_size, input_len, output_len), held))
        on_iteration()
    whole, first_tokens, token_times = zip(*runs, strict=True)
    return LatencyResult(batch_size, input_len, output_len, whole, first_tokens, token_times if output_len > 1 else (),
                         _middle(prefills), _middle(decodes))


def _middle(iterations: list[Achieved]) -> Achieved | None:
    """Return the result with the median share of the limit."""
    return sorted(iterations, key=lambda each: each.of_limit)[len(iterations) // 2] if iterations else None


def _mean_step(limits: Limits, batch_size: int, input_len: int, output_len: int) -> Bound:
    """Return the bound of the mean step, at the mean context: bytes and FLOPs grow linearly with the context."""
    return limits.step([(1, input_len + output_len // 2)] * batch_size)
