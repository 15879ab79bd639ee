"""How close a run came to the limits of the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spillover.bench.target import BenchRequest, Bound, Limits
from spillover.units import format_rate


@dataclass(frozen=True)
class Achieved:
    """A piece of work with its measured time and the least time it could have taken."""

    seconds: float
    bound: Bound
    memory_rate: float
    matrix_rate: float

    @property
    def bytes_per_second(self) -> float:
        return self.bound.bytes / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.bound.flops / self.seconds

    @property
    def of_limit(self) -> float:
        return self.bound.seconds / self.seconds

    @property
    def of_memory_rate(self) -> float:
        return self.bytes_per_second / self.memory_rate

    @property
    def of_matrix_rate(self) -> float:
        return self.flops_per_second / self.matrix_rate

    def cells(self) -> list[str]:
        """Return four table cells: bytes/s and FLOPs/s with shares of their rates, share of the limit, and bound."""
        return [f"{format_rate(self.bytes_per_second, 'B/s')} ({self.of_memory_rate:.0%})",
                f"{format_rate(self.flops_per_second, 'FLOP/s')} ({self.of_matrix_rate:.0%})",
                f"{self.of_limit:.0%}", self.bound.name]

    def as_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "achieved_gb_per_second": self.bytes_per_second / 1e9,
                "achieved_gflop_per_second": self.flops_per_second / 1e9,
                "percent_of_memory_rate": 100 * self.of_memory_rate,
                "percent_of_matrix_rate": 100 * self.of_matrix_rate,
                "limit_seconds": self.bound.seconds, "percent_of_roofline": 100 * self.of_limit,
                "bound": self.bound.name}


def achieved(seconds: float, bound: Bound, limits: Limits) -> Achieved:
    return Achieved(seconds, bound, limits.memory_rate, limits.matrix_rate)


def workload_bound(limits: Limits, requests: Sequence[BenchRequest], cached: Sequence[int], max_num_seqs: int) -> Bound:
    """Return the least time a set of requests can take when at most `max_num_seqs` run at once.

    Every computed prompt token and every output token is computed once (`cached`: number of prompt tokens per request
    that need no computation); the weights are read once per step, in the fewest steps that the longest output and the
    batch limit allow. Prefill of one request may overlap with the decode of another, so the larger of total bytes and
    total FLOPs binds; with one request at a time nothing can overlap.
    """
    prefill = limits.step([(len(request.prompt_token_ids) - hit, hit)
                           for request, hit in zip(requests, cached, strict=True)])
    decoded = sum(request.output_len - 1 for request in requests)  # the prefill step samples each request's first token
    steps = max(max(request.output_len for request in requests) - 1, math.ceil(decoded / max_num_seqs))
    if steps == 0:
        return prefill
    context = round(sum(len(request.prompt_token_ids) + request.output_len / 2 for request in requests) / len(requests))
    small, larger = divmod(decoded, steps)  # `larger` of the steps have one request more than the others
    parts = [(larger, limits.step([(1, context)] * (small + 1)))]
    if small:
        parts.append((steps - larger, limits.step([(1, context)] * small)))
    bytes_ = prefill.bytes + sum(count * step.bytes for count, step in parts)
    flops = prefill.flops + sum(count * step.flops for count, step in parts)
    memory, compute = bytes_ / limits.memory_rate, flops / limits.matrix_rate
    seconds = max(memory, compute)
    if max_num_seqs == 1:
        seconds = prefill.seconds + sum(count * step.seconds for count, step in parts)
    return Bound(seconds, bytes_, flops, "memory" if memory >= compute else "compute")
