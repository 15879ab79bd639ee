"""The copies of stored blocks between tiers, and the search for a prompt's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from spillover.memory.spill.host import Entry
from spillover.memory.tiers.base import Ticket, Tier


class LoadState(Enum):
    WAITING = "waiting"  # waiting for a slot
    FETCHING = "fetching"  # being copied from a tier below into host memory
    HELD = "held"  # in host memory, or in a tier that the link can copy from (direct.py)
    COPYING = "copying"  # being copied to the device
    DONE = "done"
    FAILED = "failed"  # the block has to be computed


class Load:
    """A load of stored blocks to the device, all in the same state: a run of blocks that are in host memory from the
    start, or one block that is fetched into host memory first or copied directly from a mapped tier."""

    __slots__ = ("blocks", "deadline", "entries", "keys", "on_end", "state", "tier")

    def __init__(self, keys: list[bytes], tier: str, deadline: float) -> None:
        self.keys = keys
        self.tier = tier  # tier in which the blocks were found
        self.deadline = deadline
        self.state = LoadState.WAITING
        self.entries: list[Entry] = []  # entries of its blocks in host memory, each pinned by this load
        self.blocks: Sequence[int] = ()  # target blocks on the device, once they are known
        self.on_end: Callable[[Sequence[Load]], None] | None = None  # called with loads that complete together

    @property
    def pending(self) -> bool:
        return self.state not in (LoadState.DONE, LoadState.FAILED)


def batches(loads: Sequence[Load], most: int) -> Iterator[list[Load]]:
    """Yield consecutive loads in batches of at most `most` blocks together; no single load has more."""
    batch: list[Load] = []
    count = 0
    for load in loads:
        if batch and count + len(load.keys) > most:
            yield batch
            batch, count = [], 0
        batch.append(load)
        count += len(load.keys)
    if batch:
        yield batch


# Called with device blocks and the entries of their slots when a copy from the device has completed; an entry that was
# not kept has no slot. The callback must not start copies.
CopyEnd = Callable[[Sequence[int], Sequence[Entry]], None]


@dataclass(frozen=True)
class CopyOut:
    """One copy over the link from the device."""

    ticket: Ticket[float]
    blocks: list[int]
    entries: list[Entry]
    on_end: CopyEnd


@dataclass(frozen=True)
class CopyIn:
    """One copy over the link to the device."""

    ticket: Ticket[float]
    blocks: list[int]
    loads: list[Load]


@dataclass(frozen=True)
class Fetch:
    """A copy of one block from a tier below to host memory."""

    entry: Entry
    tier: Tier
    started: float
    place: int  # position in its batch, from 1
    ticket: Ticket[bool]


class Search:
    """The tiers that have the blocks of a prompt; tiers answer lookups later or, after their deadline, not at all."""

    def __init__(self, sources: list[str | None], answered: Callable[[Tier, int, bool], None]) -> None:
        """Search tiers. `answered` is called with each tier's result for each index; no answer counts as a miss."""
        self.sources = sources
        self._answered = answered
        self._lookups: list[tuple[Tier, list[int], Ticket[list[bool]]]] = []
        self._nearness: dict[str, int] = {}  # rank of each tier in the order of the lookups, nearest first

    def add_lookup(self, tier: Tier, indices: list[int], ticket: Ticket[list[bool]]) -> None:
        self._lookups.append((tier, indices, ticket))
        self._nearness.setdefault(tier.name, len(self._nearness))

    def ready(self, now: float) -> bool:
        waiting = []
        for tier, indices, ticket in self._lookups:
            if ticket.expired(now):
                ticket.cancel()
            elif not ticket.done():
                waiting.append((tier, indices, ticket))
                continue
            results = ticket.result() or [False] * len(indices)
            for index, found in zip(indices, results, strict=True):
                self._answered(tier, index, found)
                known = self.sources[index]
                if found and (known is None or self._nearness[tier.name] < self._nearness.get(known, -1)):
                    self.sources[index] = tier.name  # a farther tier may have answered before
        self._lookups = waiting
        return not waiting
