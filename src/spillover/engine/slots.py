"""Requests as the device knows them: each has a slot, a row of the block tables that lie there.

Tables grow by appending while a request decodes, so a step sends only the new entries. What the sampler needs of a
request stands in arrays by slot, for a whole batch to be gathered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from spillover.engine.batch import ScheduledRequest
from spillover.engine.request import Request, Status
from spillover.engine.sampler import is_plain, seed_stream


@dataclass(slots=True)
class _Row:
    request: Request
    slot: int
    tables: tuple[list[int], ...]  # as last sent
    sent: int  # entries of each


class Slots:
    def __init__(self, count: int, groups: int, width: int, device: torch.device) -> None:
        """`width`: blocks of the longest sequence. There is one slot more, whose table is empty: for padding."""
        self.padding = count
        self.tables = torch.zeros(groups, count + 1, width, dtype=torch.int32, device=device)
        self.plain = np.zeros(count, dtype=bool)  # drawn by temperature alone
        self.temperature = np.zeros(count, dtype=np.float32)  # 0: greedy
        self.stream = np.zeros(count, dtype=np.uint64)  # where the request's random numbers begin
        self.draw = np.full(count, -1, dtype=np.int32)  # its row among the last step's draws
        self._rows: dict[str, _Row] = {}
        self._free = list(range(count - 1, -1, -1))
        self._stride = (count + 1) * width
        self._width = width

    def take(self, items: Sequence[ScheduledRequest]) -> tuple[npt.NDArray[np.int64], list[int], list[int]]:
        """Each item's slot, and the table entries to send: places in the flat tables, and blocks."""
        slots: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        rows = self._rows
        for item in items:
            row = rows.get(item.request.request_id)
            if row is None or row.request is not item.request:
                row = self._enter(item)
            tables = item.tables
            size = len(tables[0])
            # While a prompt is computed or restored, entries may be filled in anywhere.
            if item.count > 1 or tables[0] is not row.tables[0] or item.request.restoring or item.cold:
                row.sent, row.tables = 0, tables
            if row.sent < size:
                for group, table in enumerate(tables):
                    first = group * self._stride + row.slot * self._width
                    places.extend(range(first + row.sent, first + size))
                    blocks.extend(table[row.sent:size])
                row.sent = size
            slots.append(row.slot)
        return np.array(slots, dtype=np.int64), places, blocks

    def slot(self, item: ScheduledRequest) -> int:
        """Of an item that was taken."""
        return self._rows[item.request.request_id].slot

    def _enter(self, item: ScheduledRequest) -> _Row:
        request = item.request
        if not self._free:
            self._sweep()
        slot = self._free.pop()
        row = self._rows[request.request_id] = _Row(request, slot, item.tables, 0)
        params = request.params
        self.plain[slot] = is_plain(params) and request.grammar is None
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.stream[slot] = seed_stream(request.seed)
        self.draw[slot] = -1
        return row

    def _sweep(self) -> None:
        """Requests that run hold at most half of the slots; the others are free again."""
        for name, row in list(self._rows.items()):
            if row.request.status is not Status.RUNNING and row.request.in_flight == 0:
                self._free.append(row.slot)
                del self._rows[name]
