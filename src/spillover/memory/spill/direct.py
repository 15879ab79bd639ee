"""Copies between the device and a tier whose memory this process has mapped, without a host memory slot in between.

The tier's threads copy: they keep the block in place during the copy, and compare its checksum. Blocks that such a
tier has are always loaded directly. Blocks are spilled directly only if the tier is the only one: host memory and
other tiers store blocks from a slot of host memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from spillover.memory.spill.loads import CopyEnd, CopyIn, CopyOut, Load, LoadState
from spillover.memory.tiers.base import MappedTier, Ticket, Tier
from spillover.memory.transfer.link import DeviceLink

IN_FLIGHT_BYTES = 256 << 20  # bytes of outgoing copies in flight: more would wait past the tier's deadline
MIN_IN_FLIGHT = 32  # number of blocks that may be in flight whatever their size


@dataclass(frozen=True)
class DirectOut:
    """A copy of one block from the device to the tier."""

    key: bytes
    block: int
    on_end: CopyEnd
    ticket: Ticket[bool]


@dataclass(frozen=True)
class DirectIn:
    """A copy of one block from the tier to the device."""

    load: Load
    started: float
    place: int  # position among the copies started together, from 1
    ticket: Ticket[bool]


_Copy = TypeVar("_Copy", DirectOut, DirectIn, CopyOut, CopyIn)


class DirectCopies:
    """The direct copies in flight in both directions."""

    def __init__(self, link: DeviceLink, tiers: Sequence[Tier], keeps: bool) -> None:
        """Find the mapped tier, if there is one. `keeps`: whether host memory is a tier as well."""
        self.tier = next((tier for tier in tiers if isinstance(tier, MappedTier)), None)
        self.spills = self.tier is not None and len(tiers) == 1 and not keeps
        self._link = link
        self._most = max(MIN_IN_FLIGHT, IN_FLIGHT_BYTES // link.slot_bytes)
        self._outgoing: list[DirectOut] = []
        self._incoming: list[DirectIn] = []

    @property
    def busy(self) -> bool:
        return bool(self._outgoing or self._incoming)

    @property
    def ended(self) -> bool:
        """Return whether all started copies have completed, so that none can access the device any more."""
        copies: list[DirectOut | DirectIn] = [*self._outgoing, *self._incoming]
        return all(copy.ticket.done() for copy in copies)

    @property
    def loading(self) -> bool:
        return bool(self._incoming)

    @property
    def loaded(self) -> bool:
        """Return whether a copy to the device has completed and pop_copied_in() has not returned it yet."""
        return any(copy.ticket.done() for copy in self._incoming)

    @property
    def room(self) -> int:
        """Return the number of blocks whose copy from the device may be started now."""
        return max(0, self._most - len(self._outgoing))

    def reaches(self, tier: str) -> bool:
        return self.tier is not None and self.tier.name == tier

    def start_out(self, items: Sequence[tuple[bytes, int]], on_end: CopyEnd) -> int:
        """Start storing device blocks, in order; return the number started."""
        assert self.tier is not None
        items = items[: self.room]
        tickets = self.tier.store_from(items, self._link.copy_out)
        self._outgoing += [DirectOut(key, block, on_end, ticket)
                           for (key, block), ticket in zip(items, tickets, strict=True)]
        return len(items)

    def start_in(self, loads: Sequence[Load]) -> None:
        """Start loading blocks to their device blocks."""
        if not loads:
            return
        assert self.tier is not None
        for load in loads:
            load.state = LoadState.COPYING
        now = time.monotonic()
        tickets = self.tier.load_to([(load.keys[0], load.blocks[0]) for load in loads], self._link.copy_in)
        self._incoming += [DirectIn(load, now, place, ticket)
                           for place, (load, ticket) in enumerate(zip(loads, tickets, strict=True), start=1)]

    def pop_copied_out(self) -> list[DirectOut]:
        """Return the completed copies from the device."""
        ended, self._outgoing = split_ended(self._outgoing)
        return ended

    def pop_copied_in(self) -> list[DirectIn]:
        """Return the completed copies to the device."""
        ended, self._incoming = split_ended(self._incoming)
        return ended


def split_ended(copies: list[_Copy]) -> tuple[list[_Copy], list[_Copy]]:
    """Split copies into completed and other ones; a worker may complete one concurrently, so each is checked once."""
    ended: list[_Copy] = []
    others: list[_Copy] = []
    for copy in copies:
        (ended if copy.ticket.done() else others).append(copy)
    return ended, others
