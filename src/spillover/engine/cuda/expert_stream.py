"""Missing experts that stream through buffers in groups, for steps too large to fetch their misses into slots.

Such steps leave the slots of decode unchanged. While the page table does not change either, every such step makes the
same copies, so a step can be captured together with its copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from spillover.engine.cuda.expert_arena import ExpertArena
from spillover.engine.cuda.host_share import HostShare
from spillover.engine.cuda.stream_buffers import StreamBuffers
from spillover.engine.cuda.stream_plan import StreamPlan, stream_plan
from spillover.kernels.moe.page_table import NONE, PageTable
from spillover.memory.transfer.link_queue import Priority

MAX_CAPTURED_ROWS = 512  # rows of the largest streaming step that is captured


class ExpertStream:
    def __init__(self, arena: ExpertArena, table: PageTable, records: Sequence[Tensor], buffers: StreamBuffers,
                 host: HostShare | None) -> None:
        """Make the stream. `records`: each layer's experts in host memory [experts, record]; `buffers`: buffers over
        the arena's slots that come after those of the table."""
        self.num_hosted = 0  # number of experts that the host computed
        self.copies = 0
        self.bytes_moved = 0
        self._arena = arena
        self._table = table
        self._records = records
        self._buffers = buffers
        self._host = host
        self._slot_of: npt.NDArray[np.int32] | None = None  # copy of the page table's slot_of; None once it may differ
        self._plan: StreamPlan | None = None
        self._share = 0.0  # fraction of the missing experts that the host computes under the current plan
        self._version = 0  # number of plans made so far
        self._group = 0  # index of the next group in the running step, counted over all layers

    def graph_version(self, rows: int) -> int | None:
        return self._version if self._version > 0 and rows <= MAX_CAPTURED_ROWS else None

    def table_changed(self) -> None:
        """Discard the copy of the page table: a step is about to change the table on the device."""
        self._slot_of = self._plan = None

    def loans_changed(self, layer: int, lent: range = range(0)) -> None:
        """Discard the plan after slots were lent or returned; experts in the slots `lent` are missing from now on."""
        self._plan = None
        if self._slot_of is not None:
            row = self._slot_of[layer]
            row[(row >= lent.start) & (row < lent.stop)] = NONE

    def begin_step(self, rows: int) -> None:
        share = self._host.streamed(rows) if self._host is not None else 0.0
        if self._plan is None or self._share != share:
            if self._slot_of is None:  # this copy waits for the device
                self._slot_of = self._table.slot_of.cpu().numpy().copy()
            self._plan = stream_plan(self._slot_of, self._records, share, self._buffers.size, self._buffers.places,
                                     len(self._table.owner), self._arena.slots.device)
            self._share = share
            self._version += 1
        self.bytes_moved += self._plan.bytes_moved
        self._buffers.count(Priority.PREFETCH, self._plan.bytes_moved, self._plan.copies)
        self.copies += self._plan.copies
        self.num_hosted += self._plan.num_hosted

    def mixture(self, layer: int, x: Tensor, scores: Tensor, k: int, renormalize: bool,
                limit: float | None) -> Tensor:
        plan, arena = self._plan, self._arena
        assert plan is not None, "the step has not begun"
        if layer == 0:
            self._group = 0
            self._buffers.begin(plan.groups)
        passes = arena.passes(x, scores, k, renormalize, limit)
        if plan.hosted is not None and self._host is not None:
            passes.delegate(plan.hosted[layer], layer, self._host.queue)
        passes.add(arena.first, arena.second, self._table.slot_of[layer])
        for _ in range(plan.groups_of[layer]):
            self._buffers.acquire()
            passes.add(arena.first, arena.second, plan.rows[self._group])
            self._buffers.release()
            self._group += 1
        return passes.end()
