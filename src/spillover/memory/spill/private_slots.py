"""Slots of host memory for blocks of a live sequence that the device has no room for: no other sequence finds them."""

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
        self._taken = 0  # slots so far, for names that none has twice

    def offload(self, blocks: Sequence[int], on_end: CopyEnd) -> list[Entry] | None:
        """Copy blocks to slots that stay theirs until release; None if there are not enough."""
        entries: list[Entry] = []
        for _ in blocks:
            self._taken += 1
            entry = self._host.reserve(b"offloaded" + self._taken.to_bytes(8, "little"))
            if entry is None:
                for taken in entries:
                    taken.pins = 0  # none of them is ready
                    self._host.drop(taken)
                return None
            entry.private = True
            self._host.pin(entry)  # beside the copy's own
            entries.append(entry)
        self._copies.start_out(blocks, entries, on_end)
        return entries

    def release(self, entries: Sequence[Entry]) -> None:
        """Give slots up, each at once or when the copy into it has ended."""
        for entry in entries:
            self._unpin(entry)

    def address(self, entry: Entry) -> int:
        """Return where the block lies in host memory."""
        return self._host.slots.address(entry.slot)
