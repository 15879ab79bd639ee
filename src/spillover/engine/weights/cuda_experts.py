"""Experts on a CUDA device: a few slots a layer, filled by the device itself in the middle of a step.

Up to `paged_tokens` tokens nothing in a step waits for the host: the device looks experts up in its page table, fetches
those it misses straight from pinned host memory, and leaves some of them to the host's cores where that is faster. Such
a step can be recorded in a graph. Larger steps, prefill above all, stream the missing experts past in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spillover.engine.weights.policy_thread import PolicyThread
from spillover.engine.weights.traffic import WeightTraffic
from spillover.engine.weights.transit import Group, Transit, grouped
from spillover.errors import SpilloverError
from spillover.kernels.host_experts import HostExperts
from spillover.kernels.mail import Mail
from spillover.kernels.moe import Experts
from spillover.kernels.paged_moe import begin_passes, paged_mixture
from spillover.kernels.paging import LENT, NONE, PageTable
from spillover.memory.experts import ExpertCache

HOSTED_TOKENS = 256  # of the largest step that streams with the host's help; larger ones keep its cores too long


@dataclass(frozen=True)
class Arena:
    """Slots of one expert each, those of transit after all others; `first` and `second` are the stacks over all."""

    slots: Tensor  # uint8 [n, record]
    first: Experts
    second: Experts


class CudaExperts:
    """All layers whose experts are neither resident nor pass with their part, in the order of the page table."""

    def __init__(self, arena: Arena, table: PageTable, runs: Sequence[Tensor], transit: Transit, transit_at: int,
                 paged_tokens: int) -> None:
        """`runs`: each layer's records at home [experts, record]; `transit_at`: the first slot of transit."""
        self.arena = arena
        self.table = table
        self.runs = runs
        self.transit = transit
        self.paged_tokens = paged_tokens
        self.host: HostExperts | None = None
        self.mail: Mail | None = None
        self.split: list[Tensor | None] = [None] * len(runs)  # of a layer's missing experts, how many the host gets
        self.host_share = 0.0  # of the experts that would stream past, those that the host computes instead
        self.replay: Tensor | None = None  # int32 [N, L, k]: routing that is played back instead of the router's
        self.thread: PolicyThread | None = None
        self.on_demand: ExpertCache | None = None  # the host's own table, where the host does all fetching
        self._home: Callable[[int, int], Tensor] = lambda layer, expert: runs[layer][expert]
        self._transit_at = transit_at
        self._first: list[int] = table.first.tolist()
        self._least = table.log.shape[2] + 1  # slots that the largest step may need, and one to give up
        self._lent: list[set[int]] = [set() for _ in runs]
        self._storage_bytes = arena.slots.untyped_storage().nbytes()
        self._rows: Tensor = torch.empty(0)  # int32 [groups, E]: of the step under way, expert -> slot of transit
        self._groups_of: list[int] = []  # by layer
        self._hosted: list[list[int]] = []  # experts of the step under way that the host computes, by layer
        self._hosted_experts = 0
        self._group = 0
        self._demand_bytes = self._demand_fetches = 0
        self._record_bytes = arena.slots.shape[1]

    def delegate(self, host: HostExperts, mail: Mail, split: Sequence[Tensor | None], share: float = 0.0) -> None:
        """The host computes some of the experts that are missing; it answers the mail from now on. `share`: of those
        missing in a step that streams, if it has few enough tokens."""
        host.attach(mail)
        self.host, self.mail, self.split, self.host_share = host, mail, list(split), share
        self._beside = ThreadPoolExecutor(1, "spillover-host-experts")

    def fetch_on_demand(self, cache: ExpertCache, home: Callable[[int, int], Tensor]) -> None:
        """The host does all fetching, when the routing is known; `home(layer, expert)`: the record, read if need be."""
        self.on_demand, self._home = cache, home

    @property
    def recordable(self) -> int:
        """Tokens of the largest step that a graph can hold."""
        return 0 if self.on_demand is not None else self.paged_tokens

    def begin_step(self) -> None:
        """A step is about to be launched."""
        if self.host is not None:
            self.host.wake()

    def end_step(self, rows: int) -> None:
        """A step's results have come."""
        if self.mail is not None and self.mail.failed:
            raise SpilloverError("the host did not answer the device in time: experts that it was to compute are "
                                 "missing, and the step is lost; start again with --weights experts --policy lru, or "
                                 "give the process more cores")
        if self.thread is not None and rows <= self.paged_tokens:
            self.thread.ended()

    def mixture(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                fixed: bool) -> Tensor:
        if self.on_demand is not None:
            return self._demanded(self.on_demand, layer, x, scores, k, renormalize, limit, fixed)
        if x.shape[0] > self.paged_tokens:
            return self._streamed(layer, x, scores, k, renormalize, limit, fixed)
        if layer == 0:
            self.table.advance()
        split = self.split[layer]
        return paged_mixture(
            x, scores, self.table, layer, self.runs[layer], self.arena.slots, self.arena.first, self.arena.second, k,
            renormalize, limit, fixed, split, self.mail if split is not None else None, self.replay,
        )

    @property
    def nbytes(self) -> int:
        return self.arena.slots.numel()

    @property
    def traffic(self) -> WeightTraffic:
        """Waits for the device."""
        hits, gathered, hosted = self.table.totals.sum(0).tolist()
        moved = gathered * self._record_bytes + self.transit.bytes_moved + self._demand_bytes
        if self.on_demand is not None:
            hits, gathered = self.on_demand.counts.hits, self.on_demand.counts.misses
        return WeightTraffic(moved, gathered + self.transit.fetches + self._demand_fetches, 0, hits, gathered,
                             hosted + self._hosted_experts)

    def lend(self, layer: int) -> int | None:
        """The table is changed on the device, in the order of steps."""
        if self.on_demand is not None:
            return self.on_demand.lend(layer)
        quota = self._first[layer + 1] - self._first[layer]
        if quota - len(self._lent[layer]) <= self._least:
            return None
        slot = next(slot for slot in range(self._first[layer + 1] - 1, -1, -1) if slot not in self._lent[layer])
        self._lent[layer].add(slot)
        row = self.table.slot_of[layer]
        row.masked_fill_(row == slot, NONE)
        self.table.owner[slot] = LENT
        return slot

    def give_back(self, layer: int, slot: int) -> None:
        if self.on_demand is not None:
            self.on_demand.give_back(layer, slot)
            return
        self._lent[layer].remove(slot)
        self.table.owner[slot] = NONE

    def sleep(self) -> None:
        self.arena.slots.untyped_storage().resize_(0)

    def wake_up(self) -> None:
        self.arena.slots.untyped_storage().resize_(self._storage_bytes)
        self.table.slot_of.fill_(NONE)
        self.table.owner[self.table.owner >= 0] = NONE
        if self.on_demand is not None:
            self.on_demand.clear()

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()
        if self.host is not None:
            self._beside.shutdown()
            self.host.close()

    def _streamed(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                  fixed: bool) -> Tensor:
        if layer == 0:
            self._begin_stream(self.host_share if x.shape[0] <= HOSTED_TOKENS else 0.0)
        passes = begin_passes(x, scores, k, renormalize, self.arena.first.format, self.arena.second.width, limit, fixed)
        hosted = self._begin_hosted(layer, x, passes.ids)
        passes.add(self.arena.first, self.arena.second, self.table.slot_of[layer])
        for _ in range(self._groups_of[layer]):
            self.transit.take()
            passes.add(self.arena.first, self.arena.second, self._rows[self._group])
            self.transit.leave()
            self._group += 1
        if hosted is not None:
            pairs, rows = hosted
            passes.fill(pairs[:, 2].long().to(x.device), rows.result().to(x.device))
        return passes.end()

    def _begin_hosted(self, layer: int, x: Tensor, ids: Tensor) -> tuple[Tensor, Future[Tensor]] | None:
        """The host starts on its share of the layer, for which it has to see the routing."""
        mine, host = self._hosted[layer], self.host
        if not mine or host is None:
            return None
        chosen, k = ids.flatten().cpu(), ids.shape[1]
        wanted = torch.isin(chosen, torch.tensor(mine, dtype=chosen.dtype)).nonzero().flatten().int()
        pairs = torch.stack([wanted // k, chosen[wanted.long()], wanted, torch.zeros_like(wanted)], 1)
        host.wake()
        self._hosted_experts += len(mine)
        return pairs, self._beside.submit(host.run, layer, x.float().cpu(), pairs)

    def _begin_stream(self, share: float) -> None:
        """What is missing in every layer, which the device alone knows, and where each of it will lie. `share`: of
        what is missing, for the host."""
        slot_of = self.table.slot_of.cpu().numpy()
        groups: list[Group] = []
        self._groups_of, self._hosted = [], []
        for layer, slots in enumerate(slot_of):
            missing = np.nonzero(slots < 0)[0].tolist()
            self._hosted.append(missing[len(missing) - round(share * len(missing)) :])
            missing = missing[: len(missing) - len(self._hosted[-1])]
            parts = grouped(missing, self.transit.size)
            self._groups_of.append(len(parts))
            groups += [Group(self.runs[layer], experts) for experts in parts]
        self._group = 0
        self.transit.begin(groups)  # the first are on their way while the rest is written down
        rows = np.full((len(groups), slot_of.shape[1]), NONE, dtype=np.int32)
        for index, group in enumerate(groups):
            first = self._transit_at + index % self.transit.places * self.transit.size
            rows[index, list(group.experts)] = np.arange(first, first + len(group.experts))
        self._rows = torch.from_numpy(rows).to(self.arena.slots.device)

    def _demanded(self, cache: ExpertCache, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                  limit: float | None, fixed: bool) -> Tensor:
        """The host reads the routing, copies what is missing, and only then are the experts computed: what paging by
        faults amounts to."""
        passes = begin_passes(x, scores, k, renormalize, self.arena.first.format, self.arena.second.width, limit, fixed)
        wanted = sorted(set(passes.ids.flatten().tolist()))
        wanted.sort(key=lambda expert: cache.slot(layer, expert) is None)  # what is there is used before it may go
        for experts in grouped(wanted, cache.quota):
            row = torch.full((cache.experts,), -1, dtype=torch.int32)
            for expert in experts:
                slot = cache.ask(layer, expert)
                if slot is None:
                    slot = cache.take(layer, expert, keep=experts)
                    assert slot is not None
                    self.arena.slots[slot].copy_(self._home(layer, expert), non_blocking=True)
                    self._demand_bytes += self._record_bytes
                    self._demand_fetches += 1
                row[expert] = slot
            passes.add(self.arena.first, self.arena.second, row.to(x.device))
        return passes.end()


class CudaLayerExperts:
    """One layer of them, as the model sees it."""

    def __init__(self, experts: CudaExperts, layer: int) -> None:
        self._experts = experts
        self._layer = layer

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                fixed: bool) -> Tensor:
        return self._experts.mixture(self._layer, x, scores, k, renormalize, limit, fixed)
