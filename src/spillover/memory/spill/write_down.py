"""Writes of blocks from host memory to the tiers below it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from spillover.memory.policies.admission import AdmissionPolicy
from spillover.memory.spill.host import Entry, HostCache
from spillover.memory.tiers.base import Ticket, Tier

WRITES_AT_ONCE = 32  # maximum number of blocks that `write_until` writes at the same time


class WriteDown:
    def __init__(self, host: HostCache, tiers: Sequence[Tier], admission: AdmissionPolicy,
                 on_offered: Callable[[Tier, bytes, bool], None], unpin: Callable[[Entry], None]) -> None:
        """Write to lower tiers. `on_offered` is called for each block offered to a tier, with whether the tier has it
        now; `unpin` releases an entry that a write had pinned."""
        self._host = host
        self._tiers = tiers
        self._admission = admission
        self._on_offered = on_offered
        self._unpin = unpin
        self._pending: list[tuple[Entry, Tier, Ticket[bool]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def tickets(self) -> Iterator[Ticket[bool]]:
        return (ticket for _, _, ticket in self._pending)

    def entries(self) -> Iterator[Entry]:
        """Yield the entry that each pending write has pinned."""
        return (entry for entry, _, _ in self._pending)

    def process_completed(self) -> None:
        """Process completed writes."""
        if not self._pending:
            return
        pending = []
        now = time.monotonic()
        for entry, tier, ticket in self._pending:
            if ticket.expired(now):
                ticket.cancel()
            if not ticket.done():  # the slot stays pinned until the worker no longer uses it
                pending.append((entry, tier, ticket))
                continue
            self._on_offered(tier, entry.key, bool(ticket.result()))
            entry.writes -= 1
            if entry.writes == 0:
                self._host.mark_safe(entry)
            self._unpin(entry)
        self._pending = pending

    def write_until(self, spare: int) -> None:
        """Start writing the oldest blocks that no tier below has, until `spare` slots can be reused without loss."""
        short = min(spare - self._host.spare, WRITES_AT_ONCE) - len(self._pending)
        if short <= 0 or not self._tiers:
            return
        entries: list[Entry] = []
        for entry in self._host.unsafe():
            if len(entries) == short:
                break
            if entry.writes == 0:
                entries.append(entry)
        self.write(entries)

    def write(self, entries: Sequence[Entry]) -> None:
        for tier in self._tiers:
            chosen: list[Entry] = []
            for entry in entries:
                if self._admission.admit(entry.key, tier.name):
                    chosen.append(entry)
                else:
                    self._on_offered(tier, entry.key, False)
            self._store(tier, chosen)
        for entry in entries:
            if entry.writes == 0:  # the admission policy rejects it for every tier
                self._host.mark_safe(entry)

    def promote(self, entry: Entry, source: Tier) -> None:
        """Write a block loaded from a lower tier to the shared pool above it, where the next load is faster; the lower
        tiers have it in any case."""
        for tier in self._tiers[: self._tiers.index(source)]:
            if tier.name == "pool" and self._admission.admit(entry.key, tier.name):
                self._store(tier, [entry])

    def _store(self, tier: Tier, entries: Sequence[Entry]) -> None:
        tickets = tier.store([(entry.key, self._host.slots.view(entry.slot)) for entry in entries])
        for entry, ticket in zip(entries, tickets, strict=True):
            self._host.pin(entry)
            entry.writes += 1
            self._pending.append((entry, tier, ticket))
