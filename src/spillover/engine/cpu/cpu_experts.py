"""Experts on the CPU, where the "device" is a bounded arena: fetched into a slot when tokens ask for them, one after
another, or computed with where they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from spillover.engine.weights.mover import Mover, Source
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.formats.base import Linear
from spillover.kernels.linear import linear
from spillover.kernels.records import Record
from spillover.memory.experts import ExpertCache
from spillover.models.weights import PartWeights


class ExpertSlots:
    """The arena and its cache, for all layers that have slots."""

    def __init__(self, cache: ExpertCache, record: Record, arena: Tensor, source: Callable[[int, int], Source],
                 mover: Mover) -> None:
        """`source(layer, expert)`: the record at its home; layers are counted as the cache counts them."""
        self.cache = cache
        self._record = record
        self._arena = arena
        self._source = source
        self._mover = mover
        self._tickets: dict[int, Any] = {}  # of copies under way, by slot
        self._bound: dict[int, PartWeights] = {}  # by slot
        self.step = 0
        self.bytes_moved = 0
        self.fetches = 0

    def fill(self) -> None:
        """The first experts of every layer, until their slots are full."""
        for layer in range(self.cache.layers):
            for expert in range(self.cache.quota):
                self.fetch(layer, expert, (), asked=False)

    def fetch(self, layer: int, expert: int, keep: Sequence[int], asked: bool, pinned: bool = False) -> int | None:
        """Starts the copy into a slot of its own."""
        slot = self.cache.take(layer, expert, keep, asked, pinned)
        if slot is not None:
            self._tickets[slot] = self._mover.start(self._arena[slot], self._source(layer, expert), None)
            self.bytes_moved += self._record.nbytes
            self.fetches += 1
        return slot

    def bind(self, slot: int) -> PartWeights:
        """What lies there, once it has come."""
        ticket = self._tickets.pop(slot, None)
        if ticket is not None:
            self._mover.wait(ticket)
        if slot not in self._bound:
            self._bound[slot] = cast(PartWeights, self._record.bind(self._arena[slot]))
        return self._bound[slot]

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def settle(self) -> None:
        """Every copy has ended."""
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
    """All layers' experts that are not resident."""

    def __init__(self, slots: ExpertSlots | None, hosts: Sequence[HomeExperts]) -> None:
        self.slots = slots
        self._hosts = hosts

    @property
    def traffic(self) -> WeightTraffic:
        hosted = WeightTraffic(expert_hosted=sum(host.hosted for host in self._hosts))
        return hosted if self.slots is None else hosted.plus(self.slots.traffic)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes if self.slots is not None else 0

    max_unpadded_rows = 0

    def graph_version(self, rows: int) -> int | None:
        return None

    def lend(self, layer: int, most: int) -> range:
        assert self.slots is not None
        slots = self.slots.cache.lend(layer)
        if slots:
            self.slots.settle()  # nothing is on its way there
        return slots

    def give_back(self, layer: int, slots: range) -> None:
        assert self.slots is not None
        self.slots.cache.give_back(layer, slots)

    def begin_step(self, rows: int) -> None:
        pass

    def end_step(self, rows: int) -> None:
        pass

    def sleep(self) -> None:
        """The device is the host here: nothing would be won."""

    def wake_up(self) -> None:
        pass

    def close(self) -> None:
        if self.slots is not None:
            self.slots.settle()


class SlotExperts:
    """One layer's experts, in slots."""

    def __init__(self, slots: ExpertSlots, layer: int,
                 next_router: Callable[[], tuple[Linear, Tensor | None]] | None) -> None:
        """`next_router`: the weights of the next layer's, for guesses; None: nobody guesses."""
        self._slots = slots
        self._layer = layer
        self._next_router = next_router
        self._wanted: list[int] = []

    def routed(self, x: Tensor, ids: Tensor) -> None:
        cache, layer = self._slots.cache, self._layer
        step = self._slots.next_step() if layer == 0 else self._slots.step
        self._wanted = torch.unique(ids).tolist()
        cache.policy.on_phase("decode" if ids.shape[0] == 1 else "prefill")
        cache.policy.on_route(step, layer, self._wanted)
        if self._next_router is not None and layer + 1 < cache.layers:
            self._guess(x, ids.shape[1])
        for expert in cache.policy.prefetch(layer + 1) if layer + 1 < cache.layers else ():
            if cache.slot(layer + 1, expert) is None:
                self._slots.fetch(layer + 1, expert, (), asked=False)

    def expert(self, index: int) -> PartWeights:
        cache, layer = self._slots.cache, self._layer
        slot = cache.ask(layer, index)
        if slot is None:
            # Those that come later in this step stay if they can; with a small quota some of them cannot.
            later = [expert for expert in self._wanted if expert > index]
            slot = self._slots.fetch(layer, index, later, asked=True)
            if slot is None:
                slot = self._slots.fetch(layer, index, (), asked=True)
            if slot is None:  # a policy that pins as many as there are slots
                slot = self._slots.fetch(layer, index, (), asked=True, pinned=True)
            assert slot is not None, "a layer without a slot"
        return self._slots.bind(slot)

    def _guess(self, x: Tensor, k: int) -> None:
        assert self._next_router is not None
        weight, bias = self._next_router()
        chosen = linear(x, weight, bias).topk(k).indices
        self._slots.cache.policy.on_guess(self._layer + 1, torch.unique(chosen).tolist())  # type: ignore[attr-defined]


class HomeExperts:
    """One layer's experts, computed with where they live."""

    def __init__(self, record: Record, runs: Callable[[int], Tensor]) -> None:
        self._record = record
        self._runs = runs  # an expert's bytes
        self.hosted = 0

    def routed(self, x: Tensor, ids: Tensor) -> None:
        pass

    def expert(self, index: int) -> PartWeights:
        self.hosted += 1
        return cast(PartWeights, self._record.bind(self._runs(index)))
