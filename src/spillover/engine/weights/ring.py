"""Buffers on the device that units of weights pass through, one after another in the order of a step.

With `ahead`, the following units are copied while the current one is in use; without it, a unit is fetched when it is
needed, and stays until its buffer is needed for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from spillover.memory.transfer.link_queue import Priority
from spillover.memory.transfer.transfers import Transfers

Source = Tensor | Callable[[], Tensor]  # a function reads from disk, and is called on a thread that computes nothing


class Ring:
    def __init__(self, buffers: Sequence[Tensor], order: Sequence[str], sizes: Mapping[str, int],
                 source: Callable[[str], Source], transfers: Transfers, ahead: bool) -> None:
        """Make the ring. `order`: the units in the order of their use in a step; after the last, the first follows;
        `source`: returns a unit's bytes at its home."""
        self._buffers = buffers
        self._nbytes = [buffer.untyped_storage().nbytes() for buffer in buffers]
        self._order = list(order)
        self._place = {unit: place for place, unit in enumerate(self._order)}
        self._sizes = sizes
        self._source = source
        self._transfers = transfers
        self._ahead = ahead
        # All copies have one priority: those of different priorities are not ordered, and may go to the same buffer.
        self._priority = Priority.PREFETCH if ahead else Priority.DEMAND
        self._holds: list[str | None] = [None] * len(buffers)
        self._tickets: list[Any] = [None] * len(buffers)  # ticket of the last copy into each buffer
        self._events: list[Any] = [None] * len(buffers)  # event after the last use of each buffer
        self._users = [0] * len(buffers)
        self._last = 0  # clock, in acquisitions
        self._used_at = [0] * len(buffers)  # clock at the last use of each buffer
        self.bytes_moved = 0
        self.fetches = 0

    @property
    def buffers(self) -> Sequence[Tensor]:
        return self._buffers

    def acquire(self, unit: str) -> int:
        """Return the index of the buffer that holds the unit, which stays there until `release`."""
        index = self._find(unit)
        if index is None:
            index = self._fetch(unit, ())
            assert index is not None, "more units in use than the ring has buffers"
        self._transfers.wait(self._tickets[index])
        self._users[index] += 1
        self._last += 1
        self._used_at[index] = self._last
        if self._ahead:
            self._fetch_next(unit)
        return index

    def release(self, index: int) -> None:
        self._users[index] -= 1
        self._events[index] = self._transfers.record_event()

    def resize(self, empty: bool) -> None:
        """Free the buffers' memory, or allocate it again; their contents are lost."""
        for buffer, nbytes in zip(self._buffers, self._nbytes, strict=True):
            buffer.untyped_storage().resize_(0 if empty else nbytes)
        self._holds = [None] * len(self._buffers)

    def _fetch_next(self, unit: str) -> None:
        first = self._place[unit] + 1
        soon = [self._order[(first + step) % len(self._order)] for step in range(len(self._buffers) - 1)]
        for wanted in soon:
            if self._find(wanted) is None and self._fetch(wanted, (unit, *soon)) is None:
                return

    def _find(self, unit: str) -> int | None:
        return self._holds.index(unit) if unit in self._holds else None

    def _fetch(self, unit: str, keep: Sequence[str]) -> int | None:
        """Fetch a unit into the least recently used buffer that is not in use and holds none of `keep`; return its
        index, None if there is no such buffer."""
        free = [index for index, held in enumerate(self._holds) if not self._users[index] and held not in keep]
        if not free:
            return None
        index = min(free, key=self._used_at.__getitem__)
        size = self._sizes[unit]
        self._holds[index] = unit
        self._tickets[index] = self._transfers.start(self._buffers[index][:size], self._source(unit), self._priority,
                                                     self._events[index])
        self.bytes_moved += size
        self.fetches += 1
        return index
