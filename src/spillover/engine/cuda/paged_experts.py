"""Experts that the device itself fetches in the middle of a step, into a few slots per layer.

In a step of up to `paged_tokens` tokens the device does not need the host to fetch: it looks experts up in its page
table, reads each missing one once from pinned host memory, and leaves some to the host's cores where that is faster.
Experts for which a layer has no slots left pass through the slots of the stream buffers, in further passes. Such a step
can be captured as a CUDA graph. Larger steps, mostly prefill, stream all missing experts (`expert_stream`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spillover.engine.cuda.expert_arena import ExpertArena
from spillover.engine.cuda.expert_stream import ExpertStream
from spillover.engine.cuda.host_share import HostShare
from spillover.engine.cuda.policy_thread import PolicyThread
from spillover.engine.cuda.stream_buffers import StreamBuffers
from spillover.engine.weights.graph_weights import GraphAware
from spillover.engine.weights.traffic import WeightTraffic
from spillover.kernels.moe.page_table import LENT, NONE, PageTable
from spillover.kernels.moe.paged_moe import paged_mixture
from spillover.memory.transfer.link_queue import Priority

UNPADDED_ROWS = 8  # rows up to which graphs have no padding: each padding row would request experts like a token


class PagedExperts(GraphAware):
    def __init__(self, arena: ExpertArena, table: PageTable, records: Sequence[Tensor], buffers: StreamBuffers,
                 paged_tokens: int, k: int, host: HostShare | None = None,
                 policy: PolicyThread | None = None) -> None:
        """Make the page table's owner. `records`: each layer's experts in host memory [experts, record]; `buffers`:
        buffers over the arena's slots after those of the table; `paged_tokens`: tokens of the largest step that pages
        while no slot is lent; `k`: experts per token; `policy`: None if the worth of experts never changes."""
        self.arena = arena
        self.table = table
        self._records = records
        self._stream = ExpertStream(arena, table, records, buffers, host)
        self._most_paged = paged_tokens
        self._k = k
        self._host = host
        self._policy = policy
        self._buffers = buffers
        self._gathered = 0  # experts that the device had fetched when `traffic` was last read
        self._routing: Tensor | None = None
        self.replay_at: Tensor | None = None  # int32 [T]: index into the recorded routing for each row of the step
        self._first: list[int] = table.first.tolist()
        self._lent: list[set[int]] = [set() for _ in records]
        self._room: list[int] = []  # tokens whose experts fit in one pass, of layers with more than half lent

    @property
    def paged_tokens(self) -> int:
        """Return the number of tokens of the largest step that pages now: it falls when more than half of a layer's
        slots are lent."""
        return min([self._most_paged, *self._room])

    def replay(self, routing: Tensor) -> None:
        """Make steps that page use the recorded routing int32 [N, L, k] instead of their router from now on: one row
        for all tokens of a step, or the row in `replay_at` for each token. CUDA graphs captured earlier do not."""
        self._routing = routing

    @property
    def max_unpadded_rows(self) -> int:
        return min(UNPADDED_ROWS, self.paged_tokens)

    def graph_version(self, rows: int) -> int | None:
        return 0 if rows <= self.paged_tokens else self._stream.graph_version(rows)

    def begin_step(self, rows: int) -> None:
        if self._host is not None:
            self._host.wake()
        if rows <= self.paged_tokens:
            self._stream.table_changed()
        else:
            self._stream.begin_step(rows)

    def end_step(self, rows: int) -> None:
        if self._host is not None:
            self._host.check()
        if self._policy is not None and rows <= self.paged_tokens:
            self._policy.step_completed()

    def mixture(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                limit: float | None) -> Tensor:
        if x.shape[0] > self.paged_tokens:
            return self._stream.mixture(layer, x, scores, k, renormalize, limit)
        if layer == 0:
            self.table.advance()
        split = self._host.split[layer] if self._host is not None else None
        queue = self._host.queue if self._host is not None and split is not None else None
        return paged_mixture(
            x, scores, self.table, layer, self._records[layer], self.arena.slots, self.arena.first, self.arena.second,
            k, renormalize, limit, split, queue, self._routing, self.replay_at,
        )

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

    @property
    def traffic(self) -> WeightTraffic:
        """Return the counts since the start; this waits for the device."""
        hits, gathered, hosted = self.table.totals.sum(0).tolist()
        fetched, self._gathered = gathered - self._gathered, gathered
        self._buffers.count(Priority.DEMAND, fetched * self.arena.record_bytes, fetched)
        stream = self._stream
        return WeightTraffic(gathered * self.arena.record_bytes + stream.bytes_moved, gathered + stream.copies, 0, hits,
                             gathered, hosted + stream.num_hosted)

    def lend(self, layer: int, most: int) -> range:
        """Lend up to `most` adjacent slots; the table changes on the device in the order of steps, without a wait."""
        lent, first, end = self._lent[layer], self._first[layer], self._first[layer + 1]
        most = min(most, end - first - len(lent) - (self._k + 1))
        if most <= 0:
            return range(0)
        last = next(slot for slot in range(end - 1, first - 1, -1) if slot not in lent)
        start = last
        while start > first and start - 1 not in lent and last + 1 - start < most:
            start -= 1
        slots = range(start, last + 1)
        lent.update(slots)
        self._count_room()
        row = self.table.slot_of[layer]
        row.masked_fill_((row >= start) & (row <= last), NONE)
        self.table.owner[start : last + 1].fill_(LENT)
        self._stream.loans_changed(layer, slots)
        return slots

    def return_slots(self, layer: int, slots: range) -> None:
        self._lent[layer].difference_update(slots)
        self._count_room()
        self.table.owner[slots.start : slots.stop].fill_(NONE)
        self._stream.loans_changed(layer)

    def _count_room(self) -> None:
        slots = [end - first for first, end in zip(self._first, self._first[1:], strict=False)]
        left = {count - len(lent) for count, lent in zip(slots, self._lent, strict=True) if len(lent) > count // 2}
        self._room = [(count + self.table.stream_buffers) // self._k for count in left]

    def sleep(self) -> None:
        self.arena.sleep()

    def wake_up(self) -> None:
        self.arena.wake_up()
        self._stream.table_changed()
        self.table.slot_of.fill_(NONE)
        self.table.owner[self.table.owner >= 0] = NONE

    def close(self) -> None:
        if self._policy is not None:
            self._policy.close()
        if self._host is not None:
            self._host.close()
