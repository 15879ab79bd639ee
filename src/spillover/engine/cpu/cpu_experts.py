"""Experts on the CPU, where an arena of bounded size stands in for the device: they are fetched into slots one after
another when tokens are routed to them, or computed in place in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from spillover.engine.weights.ring import Source
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.formats.base import Linear
from spillover.kernels.linear import linear
from spillover.kernels.moe.experts import Experts, ExpertWeights, expert_stacks
from spillover.kernels.moe.moe import OTHER_RANK, LocalExperts, expert_mlp, local_ids, moe, route
from spillover.kernels.moe.records import Record
from spillover.memory.experts import ExpertCache
from spillover.memory.transfer.link_queue import Priority
from spillover.memory.transfer.transfers import Transfers


class ExpertSlots:
    """The arena and its cache, for all layers that have slots."""

    def __init__(self, cache: ExpertCache, record: Record, arena: Tensor, source: Callable[[int, int], Source],
                 transfers: Transfers) -> None:
        """Hold the slots. `source(layer, expert)`: returns the expert's record, in host memory or on disk; layers are
        numbered as in the cache."""
        self.cache = cache
        self._record = record
        self._arena = arena
        self._source = source
        self._transfers = transfers
        self._tickets: dict[int, Any] = {}  # tickets of copies in flight, by slot
        self._bound: dict[int, tuple[Experts, Experts]] = {}  # views of the slots' weights, by slot
        self.step = 0
        self.bytes_moved = 0
        self.fetches = 0

    def fetch(self, layer: int, expert: int, keep: Sequence[int], demand: bool, pinned: bool = False) -> int | None:
        """Assign a slot to the expert and start the copy into it; return the slot, None if none can be evicted."""
        slot = self.cache.assign(layer, expert, keep, demand, pinned)
        if slot is not None:
            self._tickets[slot] = self._transfers.start(self._arena[slot], self._source(layer, expert),
                                                        Priority.DEMAND if demand else Priority.PREFETCH)
            self.bytes_moved += self._record.nbytes
            self.fetches += 1
        return slot

    def bind(self, slot: int) -> tuple[Experts, Experts]:
        """Wait for the slot's copy, if one is in flight; return the slot's expert as stacks of one expert."""
        ticket = self._tickets.pop(slot, None)
        if ticket is not None:
            self._transfers.wait(ticket)
        if slot not in self._bound:
            self._bound[slot] = _stacks_of_one(self._record, self._arena[slot])
        return self._bound[slot]

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def finish_copies(self) -> None:
        """Wait until every copy has completed."""
        for slot in list(self._tickets):
            self.bind(slot)

    @property
    def nbytes(self) -> int:
        return self._arena.numel()

    @property
    def traffic(self) -> WeightTraffic:
        counts = self.cache.counts
        return WeightTraffic(self.bytes_moved, self.fetches, 0, counts.hits, counts.misses)


class CpuExperts:
    """The experts of all layers that are not resident."""

    def __init__(self, slots: ExpertSlots | None, in_place: Sequence[InPlaceExperts]) -> None:
        self.slots = slots
        self._in_place = in_place

    @property
    def traffic(self) -> WeightTraffic:
        computed = WeightTraffic(expert_hosted=sum(layer.computed for layer in self._in_place))
        return computed if self.slots is None else computed.plus(self.slots.traffic)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes if self.slots is not None else 0

    def lend(self, layer: int, most: int) -> range:
        assert self.slots is not None
        slots = self.slots.cache.lend(layer)
        if slots:
            self.slots.finish_copies()  # no copy to the lent slots may be in flight
        return slots

    def return_slots(self, layer: int, slots: range) -> None:
        assert self.slots is not None
        self.slots.cache.return_slots(layer, slots)

    def sleep(self) -> None:
        """Do nothing: the device is the host."""

    def wake_up(self) -> None:
        pass

    def close(self) -> None:
        if self.slots is not None:
            self.slots.finish_copies()


class SlotExperts:
    """The experts of one layer, paged through slots."""

    def __init__(self, slots: ExpertSlots, layer: int,
                 next_router: Callable[[], tuple[Linear, Tensor | None]] | None) -> None:
        """Serve a layer from slots. `next_router`: returns the next layer's router, for the policy's guesses; None if
        the policy makes none."""
        self._slots = slots
        self._layer = layer
        self._next_router = next_router

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        ids, shares = route(scores, k, renormalize, limit, local)
        wanted = _different(ids)
        self._prepare(x, wanted, k, local)
        return moe(x, ids, shares, lambda index, rows: expert_mlp(rows, *self._fetch(index, wanted), 0, limit))

    def _prepare(self, x: Tensor, wanted: list[int], k: int, local: LocalExperts | None) -> None:
        """Report this layer's experts to the policy, and prefetch the next layer's experts that it predicts."""
        cache, layer = self._slots.cache, self._layer
        step = self._slots.next_step() if layer == 0 else self._slots.step
        cache.policy.on_phase("decode" if x.shape[0] == 1 else "prefill")
        cache.policy.on_route(step, layer, wanted)
        if layer + 1 == cache.layers:
            return
        if self._next_router is not None:
            weight, bias = self._next_router()
            chosen = linear(x, weight, bias).topk(k).indices
            cache.policy.on_guess(layer + 1, _different(local_ids(chosen, local)))  # type: ignore[attr-defined]
        for expert in cache.policy.prefetch(layer + 1):
            if cache.slot(layer + 1, expert) is None:
                self._slots.fetch(layer + 1, expert, (), demand=False)

    def _fetch(self, index: int, wanted: list[int]) -> tuple[Experts, Experts]:
        """Return one expert as stacks of one, valid until the next fetch."""
        cache, layer = self._slots.cache, self._layer
        slot = cache.lookup(layer, index)
        if slot is None:
            # Experts needed later in this step are kept if possible; with a small quota some must be evicted.
            later = [expert for expert in wanted if expert > index]
            slot = self._slots.fetch(layer, index, later, demand=True)
            if slot is None:
                slot = self._slots.fetch(layer, index, (), demand=True)
            if slot is None:  # the policy has pinned as many experts as there are slots
                slot = self._slots.fetch(layer, index, (), demand=True, pinned=True)
            assert slot is not None, "a layer without a slot"
        return self._slots.bind(slot)


class InPlaceExperts:
    """The experts of one layer, computed in place in host memory."""

    def __init__(self, record: Record, source: Callable[[int], Tensor]) -> None:
        """Serve a layer's experts in place. `source(expert)`: returns the expert's bytes."""
        self._record = record
        self._source = source
        self.computed = 0  # number of experts computed, over all steps

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        def expert(index: int, rows: Tensor) -> Tensor:
            self.computed += 1
            return expert_mlp(rows, *_stacks_of_one(self._record, self._source(index)), 0, limit)

        return moe(x, *route(scores, k, renormalize, limit, local), expert)


def _different(ids: Tensor) -> list[int]:
    """Return the distinct experts among ids, without those of other ranks."""
    return [expert for expert in torch.unique(ids).tolist() if expert != OTHER_RANK]


def _stacks_of_one(record: Record, run: Tensor) -> tuple[Experts, Experts]:
    return expert_stacks(cast(ExpertWeights, record.bind(run)))
