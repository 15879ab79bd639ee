"""The units of managed memory that may have pages on the device: at most a number of bytes, evicted in LRU order.

The driver does not report where a page is, so a unit counts in full from just before a step uses it until it has been
sent back. The bytes on the device are therefore never more than the bytes counted.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


@dataclass(frozen=True)
class Change(Generic[Unit]):
    """The moves that are necessary before units can be used."""

    evicted: tuple[Unit, ...]  # units to send back before the others are fetched, least recently used first
    fetched: tuple[Unit, ...]


class Residency(Generic[Unit]):
    def __init__(self, sizes: Mapping[Unit, int], capacity: int) -> None:
        """Start with nothing on the device. `sizes`: bytes of every unit; `capacity`: maximum bytes on the device."""
        self._sizes = sizes
        self.capacity = capacity
        self._held: dict[Unit, None] = {}  # units counted as on the device, least recently used first
        self.held_bytes = 0
        self.peak_bytes = 0

    @property
    def held(self) -> Collection[Unit]:
        """Return the units that may be on the device, least recently used first."""
        return self._held.keys()

    def use(self, units: Iterable[Unit], keep: Collection[Unit] = ()) -> Change[Unit] | None:
        """Count units as used together and return the moves this needs; None, with nothing changed, if the units in
        `keep` leave too little room."""
        wanted = dict.fromkeys(units)
        fetched = tuple(unit for unit in wanted if unit not in self._held)
        excess = self.held_bytes + sum(self._sizes[unit] for unit in fetched) - self.capacity
        evicted = []
        for unit in self._held if excess > 0 else ():
            if unit not in wanted and unit not in keep:
                evicted.append(unit)
                excess -= self._sizes[unit]
                if excess <= 0:
                    break
        if excess > 0:
            return None
        self._evict(evicted)
        for unit in wanted:
            if self._held.pop(unit, self) is self:
                self.held_bytes += self._sizes[unit]
            self._held[unit] = None
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Change(tuple(evicted), fetched)

    def clear(self) -> tuple[Unit, ...]:
        """Evict every unit; return the units that have to be sent back."""
        evicted = tuple(self._held)
        self._evict(evicted)
        return evicted

    def _evict(self, units: Iterable[Unit]) -> None:
        for unit in units:
            del self._held[unit]
            self.held_bytes -= self._sizes[unit]
