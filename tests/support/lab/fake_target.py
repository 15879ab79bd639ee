"""A target without a model: it answers at once, records the prompts and has a prefix cache of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.bench.target import BenchRequest, Bound, Completion, Counters, Limits, TierTraffic


class FakeLimits:
    """Limits that are easy to add up by hand: one byte per token of context, one FLOP per new token."""

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


class FakeTierTarget(FakeTarget):
    """Caches the whole last prompt on its device and, with `host`, every block of four tokens on the host.

    A computed token takes 10 ms and a restored one 1 ms, both multiplied by `slowness`; a block has 40 bytes.
    """

    def __init__(self, host: bool = False, slowness: float = 1.0, wrong: bool = False) -> None:
        super().__init__(limits=FakeLimits())
        self.host = host
        self.wrong = wrong
        self._slowness = slowness
        self._stored: set[tuple[int, ...]] = set()
        self._bytes_in = self._bytes_out = 0

    def _complete(self, request: BenchRequest) -> Completion:
        prompt = request.prompt_token_ids
        ends = range(4, len(prompt), 4)
        found = 4 * next((index for index, end in enumerate(ends) if prompt[:end] not in self._stored), len(ends))
        for end in ends if self.host else ():
            self._bytes_in += 40 * (prompt[:end] not in self._stored)
            self._stored.add(prompt[:end])
        self._bytes_out += 10 * found
        first = self._slowness * (0.01 * (len(prompt) - found) + 0.001 * found)
        tokens = tuple((sum(prompt) + index + self.wrong) % 50 for index in range(request.output_len))
        return Completion(request.output_len, {"computed": len(prompt) - found, "host": found}, prefill=first,
                          decode=0.1 * self._slowness * (request.output_len - 1), first_token=first, token_ids=tokens)

    def tiers(self) -> tuple[TierTraffic, ...]:
        if not self.host:
            return ()
        return (TierTraffic("host", len(self._stored), self._bytes_in, self._bytes_out, self._bytes_in / 1e6,
                            self._bytes_out / 2e6, link_in=2e6, link_out=2e6),)
