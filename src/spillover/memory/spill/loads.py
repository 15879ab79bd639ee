"""Stored blocks on their way, and the question where a prompt's blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from spillover.memory.spill.host import Entry
from spillover.memory.tiers.base import Ticket, Tier


class LoadState(Enum):
    WAITING = "waiting"  # for a slot
    FETCHING = "fetching"  # from a tier below into host memory
    HELD = "held"  # in host memory, or where a link can take it from (direct.py)
    COPYING = "copying"  # to the device
    DONE = "done"
    FAILED = "failed"  # the block is to be computed


class Load:
    """Stored blocks on their way to the device, all in the same state: a run that is in host memory from the start, or
    one block that is brought there first, or copied from a tier that is mapped here."""

    __slots__ = ("blocks", "deadline", "entries", "keys", "on_end", "state", "tier")

    def __init__(self, keys: list[bytes], tier: str, deadline: float) -> None:
        self.keys = keys
        self.tier = tier  # where they were found
        self.deadline = deadline
        self.state = LoadState.WAITING
        self.entries: list[Entry] = []  # of its blocks in host memory, pinned for it
        self.blocks: Sequence[int] = ()  # where they are to go, once that is known
        self.on_end: Callable[[Sequence[Load]], None] | None = None  # told of loads that end together

    @property
    def pending(self) -> bool:
        return self.state not in (LoadState.DONE, LoadState.FAILED)


def batches(loads: Sequence[Load], most: int) -> Iterator[list[Load]]:
    """Yield loads that follow each other, as many as have at most n blocks together; no load has more."""
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


# Told of device blocks and their slots' entries once the copy out has ended; an entry has no slot if it was not kept.
# It may not start copies itself.
CopyEnd = Callable[[Sequence[int], Sequence[Entry]], None]


@dataclass(frozen=True)
class CopyOut:
    """One job on the link, from the device."""

    ticket: Ticket[float]
    blocks: list[int]
    entries: list[Entry]
    on_end: CopyEnd


@dataclass(frozen=True)
class CopyIn:
    """One job on the link, to the device."""

    ticket: Ticket[float]
    blocks: list[int]
    loads: list[Load]


@dataclass(frozen=True)
class Fetch:
    """One block on its way from a tier below to host memory."""

    entry: Entry
    tier: Tier
    started: float
    place: int  # in its batch, from 1
    ticket: Ticket[bool]


class Search:
    """Where the blocks of a prompt are; tiers that must be asked answer later or, by their deadline, not at all."""

    def __init__(self, sources: list[str | None], answered: Callable[[Tier, int, bool], None]) -> None:
        """Search tiers. `answered` is told what each tier says of each index; no answer counts as no."""
        self.sources = sources
        self._answered = answered
        self._asked: list[tuple[Tier, list[int], Ticket[list[bool]]]] = []
        self._nearness: dict[str, int] = {}  # of tiers, the nearest first: the order in which they are asked

    def ask(self, tier: Tier, indices: list[int], ticket: Ticket[list[bool]]) -> None:
        self._asked.append((tier, indices, ticket))
        self._nearness.setdefault(tier.name, len(self._nearness))

    def ready(self, now: float) -> bool:
        waiting = []
        for tier, indices, ticket in self._asked:
            if ticket.expired(now):
                ticket.cancel()
            elif not ticket.done():
                waiting.append((tier, indices, ticket))
                continue
            there = ticket.result() or [False] * len(indices)
            for index, found in zip(indices, there, strict=True):
                self._answered(tier, index, found)
                known = self.sources[index]
                if found and (known is None or self._nearness[tier.name] < self._nearness.get(known, -1)):
                    self.sources[index] = tier.name  # a farther one may have answered before
        self._asked = waiting
        return not waiting
