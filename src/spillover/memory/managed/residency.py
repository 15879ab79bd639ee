"""Which units of managed memory may have pages on the device: a bound in bytes, least recently used leave first.

The driver says of no page where it is, so a unit counts whole from when a step is about to use it until it was sent
back. What is on the device is then never more than what is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


@dataclass(frozen=True)
class Change(Generic[Unit]):
    """What has to move before units can be used."""

    leaving: tuple[Unit, ...]  # sent back first, least recently used first
    coming: tuple[Unit, ...]


class Residency(Generic[Unit]):
    def __init__(self, sizes: Mapping[Unit, int], room: int) -> None:
        """Start with nothing on the device. `sizes`: bytes of every unit; `room`: bytes that may be on the device."""
        self._sizes = sizes
        self.room = room
        self._held: dict[Unit, None] = {}  # least recently used first
        self.held_bytes = 0
        self.peak_bytes = 0

    @property
    def held(self) -> Collection[Unit]:
        """Return the units that may be on the device, least recently used first."""
        return self._held.keys()

    def use(self, units: Iterable[Unit], keep: Collection[Unit] = ()) -> Change[Unit] | None:
        """Count units as used together, and say what leaves for them; None: `keep` leaves too little room, and nothing
        has changed."""
        wanted = dict.fromkeys(units)
        coming = tuple(unit for unit in wanted if unit not in self._held)
        excess = self.held_bytes + sum(self._sizes[unit] for unit in coming) - self.room
        leaving = []
        for unit in self._held if excess > 0 else ():
            if unit not in wanted and unit not in keep:
                leaving.append(unit)
                excess -= self._sizes[unit]
                if excess <= 0:
                    break
        if excess > 0:
            return None
        self._leave(leaving)
        for unit in wanted:
            if self._held.pop(unit, self) is self:
                self.held_bytes += self._sizes[unit]
            self._held[unit] = None
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Change(tuple(leaving), coming)

    def clear(self) -> tuple[Unit, ...]:
        """Let everything leave; return what has to be sent back."""
        leaving = tuple(self._held)
        self._leave(leaving)
        return leaving

    def _leave(self, units: Iterable[Unit]) -> None:
        for unit in units:
            del self._held[unit]
            self.held_bytes -= self._sizes[unit]
