"""Experts that the host fetches once it knows the routing: equivalent to paging by faults, and the only way to fetch
experts from disk. No such step can be captured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spillover.engine.cuda.expert_arena import ExpertArena
from spillover.engine.cuda.stream_buffers import grouped
from spillover.engine.weights.graph_weights import GraphAware
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.moe.page_table import NONE
from spillover.memory.experts import ExpertCache


class FetchedExperts(GraphAware):
    def __init__(self, arena: ExpertArena, cache: ExpertCache, source: Callable[[int, int], Tensor],
                 copy: Callable[[Tensor, Tensor], object]) -> None:
        """Make the store. `cache`: which expert is in which slot; `source(layer, expert)`: returns the expert's record,
        read from disk if necessary; `copy(slot, record)`: copies a record into a slot."""
        self.arena = arena
        self._cache = cache
        self._source = source
        self._copy = copy
        self._fetches = 0

    def graph_version(self, rows: int) -> int | None:
        return None

    def mixture(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                limit: float | None) -> Tensor:
        cache, arena = self._cache, self.arena
        passes = arena.passes(x, scores, k, renormalize, limit)
        wanted = sorted(set(passes.ids.flatten().tolist()))
        wanted.sort(key=lambda expert: cache.slot(layer, expert) is None)  # hits are used before misses may evict them
        for experts in grouped(wanted, cache.usable(layer)):
            row = torch.full((cache.experts,), NONE, dtype=torch.int32)
            for expert in experts:
                slot = cache.lookup(layer, expert)
                if slot is None:
                    slot = cache.assign(layer, expert, keep=experts)
                    if slot is None:  # the policy pins so many experts that pinned ones must be evicted
                        slot = cache.assign(layer, expert, keep=experts, pinned=True)
                    assert slot is not None
                    self._copy(arena.slots[slot], self._source(layer, expert))
                    self._fetches += 1
                row[expert] = slot
            passes.add(arena.first, arena.second, row.to(x.device))
        return passes.end()

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

    @property
    def traffic(self) -> WeightTraffic:
        counts = self._cache.counts
        return WeightTraffic(self._fetches * self.arena.record_bytes, self._fetches, 0, counts.hits, counts.misses)

    def lend(self, layer: int, most: int) -> range:
        return self._cache.lend(layer)

    def return_slots(self, layer: int, slots: range) -> None:
        self._cache.return_slots(layer, slots)

    def sleep(self) -> None:
        self.arena.sleep()

    def wake_up(self) -> None:
        self.arena.wake_up()
        self._cache.clear()

    def close(self) -> None:
        pass
