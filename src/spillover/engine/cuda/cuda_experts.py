"""Experts on a CUDA device: a few slots a layer, filled by the device itself in the middle of a step.

Up to `paged_tokens` tokens nothing in a step waits for the host: the device looks experts up in its page table, fetches
those it misses straight from pinned host memory, and leaves some of them to the host's cores where that is faster. Such
a step can be recorded in a graph. Larger steps, prefill above all, stream the missing experts past in groups; while the
page table stays as it is these can be recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.cuda.policy_thread import PolicyThread
from spillover.engine.cuda.stream_buffers import StreamBuffers, grouped
from spillover.engine.cuda.stream_plan import StreamPlan, stream_plan
from spillover.engine.weights.traffic import WeightTraffic
from spillover.errors import SpilloverError
from spillover.kernels.experts import Experts
from spillover.kernels.host_expert_queue import HostExpertQueue
from spillover.kernels.host_experts import HostExperts
from spillover.kernels.page_table import LENT, NONE, PageTable
from spillover.kernels.paged_moe import begin_passes, paged_mixture
from spillover.memory.experts import ExpertCache

HOSTED_TOKENS = 256  # of the largest step that streams with the host's help; larger ones keep its cores too long
STREAMED_ROWS = 512  # of the largest step that streams and is recorded


@dataclass(frozen=True)
class Arena:
    """Slots of one expert each, those of transit after all others; `first` and `second` are the stacks over all."""

    slots: Tensor  # uint8 [n, record]
    first: Experts
    second: Experts


class CudaExperts:
    """All layers whose experts are neither resident nor pass with their part, in the order of the page table."""

    def __init__(self, arena: Arena, table: PageTable, runs: Sequence[Tensor], transit: StreamBuffers, transit_at: int,
                 paged_tokens: int, k: int) -> None:
        """`runs`: each layer's records at home [experts, record]; `transit_at`: the first slot of transit;
        `paged_tokens`: of the largest step that pages, while no slot is lent; `k`: experts of a token."""
        self.arena = arena
        self.table = table
        self.runs = runs
        self.transit = transit
        self._most_paged = paged_tokens
        self.host: HostExperts | None = None
        self.mail: HostExpertQueue | None = None
        self.split: list[Tensor | None] = [None] * len(runs)  # of a layer's missing experts, how many the host gets
        # Of the experts that would stream past in a step of so many rows, those that the host computes instead.
        self.host_share: Callable[[int], float] = lambda rows: 0.0
        self.replay: Tensor | None = None  # int32 [N, L, k]: routing that is played back instead of the router's
        self.thread: PolicyThread | None = None
        self.on_demand: ExpertCache | None = None  # the host's own table, where the host does all fetching
        self._home: Callable[[int, int], Tensor] = lambda layer, expert: runs[layer][expert]
        self._transit_at = transit_at
        self._first: list[int] = table.first.tolist()
        self._k = k
        self._lent: list[set[int]] = [set() for _ in runs]
        self._room: list[int] = []  # tokens that layers have slots for, of which some are lent
        self._storage_bytes = arena.slots.untyped_storage().nbytes()
        self._version = 0  # of the page table, which steps that page change, and loans
        self._known: npt.NDArray[np.int32] | None = None  # the page table, while no step that pages has changed it
        self._stream: StreamPlan | None = None
        self._stream_of: tuple[int, float] | None = None  # version and host's share that it was made for
        self._epoch = 0  # streams so far
        self._group = 0
        self._hosted_experts = 0
        self._bytes = self._fetches = 0  # copied by the host's orders
        self._record_bytes = arena.slots.shape[1]

    def delegate(self, host: HostExperts, mail: HostExpertQueue, split: Sequence[Tensor | None],
                 share: Callable[[int], float] = lambda rows: 0.0) -> None:
        """The host computes some of the experts that are missing; it answers the mail from now on. `share`: of those
        missing in a step that streams, by its rows; the mail has room for HOSTED_TOKENS."""
        host.attach(mail)
        self.host, self.mail, self.split, self.host_share = host, mail, list(split), share

    def fetch_on_demand(self, cache: ExpertCache, home: Callable[[int, int], Tensor]) -> None:
        """The host does all fetching, when the routing is known; `home(layer, expert)`: the record, read if need be."""
        self.on_demand, self._home = cache, home

    @property
    def paged_tokens(self) -> int:
        """Of the largest step that pages now: it needs a slot for each that its tokens may ask for, and one to give
        up."""
        return min([self._most_paged, *self._room])

    @property
    def max_unpadded_rows(self) -> int:
        """Rows of the largest step that looks experts up as they ask for them: padding would ask too."""
        return self.paged_tokens

    def graph_version(self, rows: int) -> int | None:
        """Under which number a graph of so many rows is good, once the step has begun; None: it cannot be recorded."""
        if self.on_demand is not None:
            return None
        return 0 if rows <= self.paged_tokens else self._epoch if rows <= STREAMED_ROWS else None

    def begin_step(self, rows: int) -> None:
        """A step is about to be launched."""
        if self.host is not None:
            self.host.wake()
        if self.on_demand is not None:
            return
        if rows <= self.paged_tokens:
            self._version += 1
            self._known = None
            return
        share = self.host_share(rows) if rows <= HOSTED_TOKENS else 0.0
        if self._stream is None or self._stream_of != (self._version, share):
            if self._known is None:  # waits for the device
                self._known = self.table.slot_of.cpu().numpy().copy()
            self._stream = stream_plan(self._known, self.runs, share, self.transit.size, self.transit.places,
                                       self._transit_at, self.arena.slots.device)
            self._stream_of = (self._version, share)
            self._epoch += 1
        self._bytes += self._stream.bytes_moved
        self._fetches += self._stream.copies
        self._hosted_experts += self._stream.num_hosted

    def end_step(self, rows: int) -> None:
        """A step's results have come."""
        if self.mail is not None and self.mail.failed:
            raise SpilloverError("the host did not answer the device in time: experts that it was to compute are "
                                 "missing, and the step is lost; start again with --weights experts --policy lru, or "
                                 "give the process more cores")
        if self.thread is not None and rows <= self.paged_tokens:
            self.thread.ended()

    def mixture(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                limit: float | None) -> Tensor:
        if self.on_demand is not None:
            return self._demanded(self.on_demand, layer, x, scores, k, renormalize, limit)
        if x.shape[0] > self.paged_tokens:
            return self._streamed(layer, x, scores, k, renormalize, limit)
        if layer == 0:
            self.table.advance()
        split = self.split[layer]
        return paged_mixture(
            x, scores, self.table, layer, self.runs[layer], self.arena.slots, self.arena.first, self.arena.second, k,
            renormalize, limit, split, self.mail if split is not None else None, self.replay,
        )

    @property
    def nbytes(self) -> int:
        return self.arena.slots.numel()

    @property
    def traffic(self) -> WeightTraffic:
        """Waits for the device."""
        hits, gathered, hosted = self.table.totals.sum(0).tolist()
        moved, fetches = gathered * self._record_bytes + self._bytes, gathered + self._fetches
        if self.on_demand is not None:
            hits, gathered = self.on_demand.counts.hits, self.on_demand.counts.misses
        return WeightTraffic(moved, fetches, 0, hits, gathered, hosted + self._hosted_experts)

    def lend(self, layer: int, most: int) -> range:
        """The table is changed on the device, in the order of steps, and nothing waits for it."""
        if self.on_demand is not None:
            return self.on_demand.lend(layer)
        lent, first, end = self._lent[layer], self._first[layer], self._first[layer + 1]
        most = min(most, end - first - len(lent) - (self._k + 1))
        if most <= 0:
            return range(0)
        last = next(slot for slot in range(end - 1, first - 1, -1) if slot not in lent)
        start = last
        while start > first and start - 1 not in lent and last + 1 - start < most:
            start -= 1
        slots = range(start, last + 1)
        self._version += 1
        lent.update(slots)
        self._look_again()
        row = self.table.slot_of[layer]
        row.masked_fill_((row >= start) & (row <= last), NONE)
        self.table.owner[start : last + 1].fill_(LENT)
        if self._known is not None:
            known = self._known[layer]
            known[(known >= start) & (known <= last)] = NONE
        return slots

    def give_back(self, layer: int, slots: range) -> None:
        if self.on_demand is not None:
            self.on_demand.give_back(layer, slots)
            return
        self._version += 1
        self._lent[layer].difference_update(slots)
        self._look_again()
        self.table.owner[slots.start : slots.stop].fill_(NONE)

    def _look_again(self) -> None:
        quotas = np.diff(self._first).tolist()
        left = {quota - len(lent) for quota, lent in zip(quotas, self._lent, strict=True) if lent}
        self._room = [(slots - 1) // self._k for slots in left]

    def sleep(self) -> None:
        self.arena.slots.untyped_storage().resize_(0)

    def wake_up(self) -> None:
        self.arena.slots.untyped_storage().resize_(self._storage_bytes)
        self._version += 1
        self._known = None
        self.table.slot_of.fill_(NONE)
        self.table.owner[self.table.owner >= 0] = NONE
        if self.on_demand is not None:
            self.on_demand.clear()

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()
        if self.host is not None:
            self.host.close()

    def _streamed(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                  limit: float | None) -> Tensor:
        stream = self._stream
        assert stream is not None, "the step has not begun"
        if layer == 0:
            self._group = 0
            self.transit.begin(stream.groups)
        passes = begin_passes(x, scores, k, renormalize, self.arena.first.gemm, self.arena.second.width, limit)
        if stream.hosted is not None and self.mail is not None:
            passes.delegate(stream.hosted[layer], layer, self.mail)
        passes.add(self.arena.first, self.arena.second, self.table.slot_of[layer])
        for _ in range(stream.groups_of[layer]):
            self.transit.take()
            passes.add(self.arena.first, self.arena.second, stream.rows[self._group])
            self.transit.leave()
            self._group += 1
        return passes.end()

    def _demanded(self, cache: ExpertCache, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                  limit: float | None) -> Tensor:
        """The host reads the routing, copies what is missing, and only then are the experts computed: what paging by
        faults amounts to."""
        passes = begin_passes(x, scores, k, renormalize, self.arena.first.gemm, self.arena.second.width, limit)
        wanted = sorted(set(passes.ids.flatten().tolist()))
        wanted.sort(key=lambda expert: cache.slot(layer, expert) is None)  # what is there is used before it may go
        for experts in grouped(wanted, cache.usable(layer)):
            row = torch.full((cache.experts,), -1, dtype=torch.int32)
            for expert in experts:
                slot = cache.ask(layer, expert)
                if slot is None:
                    slot = cache.take(layer, expert, keep=experts)
                    if slot is None:  # a policy pins too many
                        slot = cache.take(layer, expert, keep=experts, pinned=True)
                    assert slot is not None
                    self.arena.slots[slot].copy_(self._home(layer, expert), non_blocking=True)
                    self._bytes += self._record_bytes
                    self._fetches += 1
                row[expert] = slot
            passes.add(self.arena.first, self.arena.second, row.to(x.device))
        return passes.end()


class CudaLayerExperts:
    """One layer of them, as the model sees it."""

    def __init__(self, experts: CudaExperts, layer: int) -> None:
        self._experts = experts
        self._layer = layer

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None) -> Tensor:
        return self._experts.mixture(self._layer, x, scores, k, renormalize, limit)
