"""Weights in managed memory: kernels use them in place; their pages move when they are touched, or are prefetched.

The budget is kept here and not by the driver: before a step uses units for whose pages the device has no room, the
least recently used ones are sent to the host. A unit is a part's weights without experts or one expert, in whole pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from spillover.engine.weights.graph_weights import GraphAware, StreamedLayers
from spillover.engine.weights.placed import Parts
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.formats.base import Weight
from spillover.kernels.moe.experts import Experts, ExpertWeights, expert_stacks
from spillover.kernels.moe.moe import LocalExperts, expert_mlps, route
from spillover.kernels.moe.page_table import NONE
from spillover.kernels.moe.paged_moe import begin_passes
from spillover.kernels.moe.records import Record, tensors_of
from spillover.memory.managed.pages import ManagedMemory, Pages, joined, padded
from spillover.memory.managed.residency import Change, Residency
from spillover.models.weights import PartWeights, one_expert_of, split_experts
from spillover.plan.placement import WeightPlan
from spillover.plan.strategies import managed_page

OWN = 0  # index of the unit with a part's weights without experts; the units of its experts follow
Unit = tuple[int, int]  # (index of the part in the order of a step, index of the unit in the part)


@dataclass(frozen=True)
class ManagedPart:
    """One part: its weights as views of managed memory, and the pages of its units."""

    weights: PartWeights
    pages: tuple[Pages, ...]  # pages of the weights without experts, then of each expert
    filled: tuple[int, ...]  # bytes of each unit without the padding that follows

    @property
    def all_pages(self) -> Pages:
        return joined(self.pages)[0]


class ManagedWeights:
    """All parts of a model in managed memory."""

    memory = experts = None
    graphs: GraphAware = StreamedLayers(GraphAware())  # no capture: the host enforces the budget layer by layer

    def __init__(self, parts: Parts, placement: WeightPlan, memory: ManagedMemory, device: torch.device) -> None:
        self._pages = memory
        self._device = device
        self._parts: list[ManagedPart] = []
        self._index: dict[str, int] = {}
        for name, weights in parts:
            self._index[name] = len(self._parts)
            self._parts.append(self._put(weights))
        sizes = {(part, index): pages.nbytes for part, each in enumerate(self._parts)
                 for index, pages in enumerate(each.pages)}
        self._residency = Residency(sizes, placement.device_bytes)
        self.host_bytes = sum(sizes.values())
        self._rows = 1  # number of tokens of the last mixture
        self._ahead: Collection[Unit] = ()  # units of the next part whose prefetch is in flight
        self._hits = self._misses = self._fetches = self._moved = self._back = 0
        self._faults = memory.faults or 0  # faults during loading, which do not count
        self.strategy = "uvm"
        self.follow(placement.strategy)

    def follow(self, strategy: str) -> None:
        """Send all pages to the host and use another strategy from now on: uvm, uvm-prefetch or uvm-advise."""
        self._evict_all()
        if (strategy == "uvm-advise") != (self.strategy == "uvm-advise"):
            self._pages.advise([part.all_pages for part in self._parts], strategy == "uvm-advise")
        self.strategy = strategy

    def part(self, name: str) -> AbstractContextManager[PartWeights]:
        return _Entered(self, self._index[name])

    def enter(self, index: int) -> PartWeights:
        """Reserve room for a part's weights without experts, and start the prefetch of the strategy, if any."""
        if self._ahead:
            self._pages.wait()
            self._ahead = ()
        self._use([(index, OWN)])
        if self.strategy == "uvm-prefetch":
            self._prefetch_next(index)
        return self._parts[index].weights

    def use_experts(self, index: int, chosen: Sequence[int], rows: int) -> None:
        """Reserve room for the experts that are chosen by a step of `rows` rows."""
        self._rows = rows
        fetched = self._use([(index, OWN), *((index, OWN + 1 + expert) for expert in chosen)])
        missed = sum(unit != OWN for _, unit in fetched)
        self._misses += missed
        self._hits += len(chosen) - missed

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None:
        """Send all pages to the host before a sleep; they return when they are used."""
        if asleep:
            self._evict_all()

    @property
    def resident_parts(self) -> Mapping[str, Mapping[str, Weight]]:
        return {}

    @property
    def nbytes(self) -> int:
        """Return an upper bound of the bytes on the device now."""
        return self._residency.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._residency.peak_bytes

    def traffic(self) -> WeightTraffic:
        faults = (self._pages.faults or 0) - self._faults
        return WeightTraffic(self._moved, self._fetches, 0, self._hits, self._misses, bytes_back=self._back,
                             faults=faults)

    def close(self) -> None:
        """Release the memory, which is freed with the last tensor over it."""
        if self._ahead:
            self._pages.wait()
        self._residency.clear()
        self._parts.clear()

    def _put(self, weights: Mapping[str, Weight]) -> ManagedPart:
        """Write a part into managed memory and send its pages to the host."""
        own, experts = split_experts(weights)
        record, page = Record.of(own), managed_page(self._device.type)
        start = padded(record.nbytes, page)
        expert = Record.of(one_expert_of(experts)) if experts else None
        count = _num_experts(experts)
        stride = padded(expert.nbytes, page) if expert is not None else 0
        buffer = self._pages.allocate(start + count * stride)
        run = _as_tensor(buffer, self._device)
        pages = [Pages(run.data_ptr(), start)]
        pages += [Pages(run.data_ptr() + start + index * stride, stride) for index in range(count)]
        filled = [record.nbytes] + [expert.nbytes if expert is not None else 0] * count
        self._pages.to_device(_cut(pages, filled))  # allocates the pages on the device at once, not fault by fault
        record.write(own, run[: record.nbytes])
        part = cast(PartWeights, record.bind(run[: record.nbytes]))
        if expert is not None:
            records = run[start:].view(count, stride)[:, : expert.nbytes]
            expert.write_stacks(experts, records)
            stacks = expert_stacks(cast(ExpertWeights, expert.stacks(records)))
            part["experts"] = ManagedExperts(self, len(self._parts), *stacks)
        self._pages.to_host(joined(pages))
        return ManagedPart(part, tuple(pages), tuple(filled))

    def _use(self, units: Sequence[Unit]) -> Sequence[Unit]:
        change = self._residency.use(units, self._ahead)
        if change is None:  # prefetched units leave too little room for the units that are needed now
            self._pages.wait()
            self._ahead = ()
            change = self._residency.use(units)
        assert change is not None, "the plan leaves room for the largest layer"
        self._move(change, self.strategy == "uvm-prefetch", ahead=False)
        return change.fetched

    def _prefetch_next(self, index: int) -> None:
        """Prefetch the next part while this one is computed, with its experts if the step has at least as many rows."""
        after = (index + 1) % len(self._parts)
        count = len(self._parts[after].pages) - 1
        units: list[Unit] = [(after, OWN)]
        if self._rows >= count:
            units += [(after, OWN + 1 + expert) for expert in range(count)]
        # No unit of the current part may be evicted: its router has not chosen experts yet.
        own = {(index, each) for each in range(len(self._parts[index].pages))}
        change = self._residency.use(units, own)
        if change is not None and change.fetched:
            self._pages.begin_prefetch()
            self._move(change, fetch=True, ahead=True)
            self._ahead = frozenset(units)

    def _move(self, change: Change[Unit], fetch: bool, ahead: bool) -> None:
        if change.evicted:
            self._pages.to_host(self._ranges(change.evicted), ahead)
            self._back += 0 if self.strategy == "uvm-advise" else self._bytes(change.evicted)
        if change.fetched:
            self._fetches += len(change.fetched)
            self._moved += self._bytes(change.fetched)
            if fetch:
                self._pages.to_device(_cut([self._parts[part].pages[index] for part, index in change.fetched],
                                           [self._parts[part].filled[index] for part, index in change.fetched]), ahead)

    def _evict_all(self) -> None:
        if self._ahead:
            self._pages.wait()
            self._ahead = ()
        evicted = self._residency.clear()
        if evicted:
            self._pages.to_host(self._ranges(evicted))

    def _bytes(self, units: Iterable[Unit]) -> int:
        return sum(self._parts[part].filled[index] for part, index in units)

    def _ranges(self, units: Iterable[Unit]) -> list[Pages]:
        """Return the pages of units, with adjacent pages of one allocation joined into one range."""
        return [pages for part, listed in itertools.groupby(sorted(units), key=lambda unit: unit[0])
                for pages in joined(self._parts[part].pages[index] for _, index in listed)]


class _Entered:
    """The context manager of a part in use; after it, the part counts as on the device until it is evicted."""

    def __init__(self, weights: ManagedWeights, index: int) -> None:
        self._weights = weights
        self._index = index

    def __enter__(self) -> PartWeights:
        return self._weights.enter(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        pass


class ManagedExperts:
    """The experts of one layer, a LayerExperts; the host waits for the router and reserves room for its choice."""

    def __init__(self, weights: ManagedWeights, index: int, first: Experts, second: Experts) -> None:
        self._weights = weights
        self._index = index
        self._first = first
        self._second = second

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        assert local is None, "managed weights are refused for several ranks before a model is loaded"
        if x.is_cuda:
            return self.in_one_pass(x, scores, k, renormalize, limit)
        first, second = self._first, self._second
        ids, shares = route(scores, k, renormalize, limit)
        self._weights.use_experts(self._index, _different(ids), x.shape[0])
        return expert_mlps(x, ids, shares, first, second, limit)

    def in_one_pass(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None) -> Tensor:
        """Return the mixture, computed by the kernels for experts in slots, which run on a CUDA device."""
        first, second = self._first, self._second
        passes = begin_passes(x, scores, k, renormalize, first.gemm, second.width, limit)
        chosen = _different(passes.ids)
        self._weights.use_experts(self._index, chosen, x.shape[0])
        row = torch.full((first.count,), NONE, dtype=torch.int32)  # experts without a slot: their pages stay untouched
        row[chosen] = torch.tensor(chosen, dtype=torch.int32)
        passes.add(first, second, row.to(x.device))
        return passes.end()


def _as_tensor(buffer: Any, device: torch.device) -> Tensor:
    """Return managed memory as a tensor of bytes, without a copy."""
    if device.type == "cpu":
        return torch.frombuffer(buffer, dtype=torch.uint8)
    run = torch.as_tensor(buffer, device=device)
    assert run.data_ptr() == buffer.address, "torch made a copy of managed memory"
    return run


def _cut(pages: Iterable[Pages], filled: Iterable[int]) -> list[Pages]:
    """Return ranges without the padding at their ends."""
    return [Pages(each.address, nbytes) for each, nbytes in zip(pages, filled, strict=True)]


def _different(ids: Tensor) -> list[int]:
    found: list[int] = ids.flatten().tolist()
    return sorted(set(found))


def _num_experts(experts: Mapping[str, Weight]) -> int:
    return tensors_of(next(iter(experts.values())))[0].shape[0] if experts else 0
