"""A target without a model: it answers at once, keeps the prompts it saw and has a prefix cache of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.bench.target import BenchRequest, Bound, Completion, Counters, Limits


class FakeLimits:
    """One byte a token of context, one FLOP a new token: easy to add up by hand."""

    memory_rate = 1000.0
    matrix_rate = 100.0

    def again(self) -> FakeLimits:
        return self

    def mean(self, other: Limits) -> FakeLimits:
        return self

    def step(self, batch: Sequence[tuple[int, int]]) -> Bound:
        read, flops = 50.0 + sum(cached for _, cached in batch), float(sum(new for new, _ in batch))
        memory, compute = read / self.memory_rate, flops / self.matrix_rate
        return Bound(max(memory, compute), read, flops, "memory" if memory >= compute else "compute")


class FakeTarget:
    planned_bytes = 1 << 30

    def __init__(self, max_num_seqs: int = 4, limits: Limits | None = None) -> None:
        self.max_num_seqs = max_num_seqs
        self.limits = limits
        self.calls: list[list[BenchRequest]] = []
        self.resets = 0
        self.closed = False
        self._cached: set[tuple[int, ...]] = set()
        self._steps = 0

    def generate(self, requests: Sequence[BenchRequest], progress: bool = False) -> list[Completion]:
        self.calls.append(list(requests))
        self._steps += max(request.output_len for request in requests)
        return [self._complete(request) for request in requests]

    def _complete(self, request: BenchRequest) -> Completion:
        prompt = request.prompt_token_ids
        hit = len(prompt) - 1 if prompt in self._cached else 0
        self._cached.add(prompt)
        return Completion(request.output_len, {"computed": len(prompt) - hit, "device": hit}, prefill=2.0,
                          decode=0.5 * (request.output_len - 1), first_token=2.0)

    def counters(self) -> Counters:
        return Counters(100, 16, self._steps, 3, slots_held=self._steps * 32, slots_wasted=self._steps * 8)

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        self._cached.clear()

    def close(self) -> None:
        self.closed = True
