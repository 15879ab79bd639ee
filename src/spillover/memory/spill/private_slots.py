"""Slots of host memory for blocks of a live sequence that the device has no room for; no other sequence finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spillover.memory.spill.copies import LinkCopies
from spillover.memory.spill.host import Entry, HostCache
from spillover.memory.spill.loads import CopyEnd


class PrivateSlots:
    def __init__(self, host: HostCache, copies: LinkCopies, unpin: Callable[[Entry], None]) -> None:
        self._host = host
        self._copies = copies
        self._unpin = unpin
        self._taken = 0  # number of slots taken so far, which makes keys unique

    def offload(self, blocks: Sequence[int], on_end: CopyEnd) -> list[Entry] | None:
        """Start copying blocks to slots that they keep until release(); None if there are not enough slots."""
        entries: list[Entry] = []
        for _ in blocks:
            self._taken += 1
            entry = self._host.reserve(b"offloaded" + self._taken.to_bytes(8, "little"))
            if entry is None:
                for taken in entries:
                    taken.pins = 0  # no copy has started
                    self._host.drop(taken)
                return None
            entry.private = True
            self._host.pin(entry)  # in addition to the copy's pin
            entries.append(entry)
        self._copies.start_out(blocks, entries, on_end)
        return entries

    def release(self, entries: Sequence[Entry]) -> None:
        """Release slots, each at once or when the copy into it has completed."""
        for entry in entries:
            self._unpin(entry)
