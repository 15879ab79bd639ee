"""What weights in managed memory ask of its pages, whatever the device; and ranges of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

FAULT_AROUND = 64 << 10  # bytes that a fault on file pages maps at most, by the system's default


class Pages(NamedTuple):
    """A range of whole pages."""

    address: int
    nbytes: int


class ManagedMemory(Protocol):
    """Memory whose pages are on the device or on the host. Its calls take effect before whatever computes next, but for
    those that are `ahead`: these let pass what was launched before, and run beside what comes until `wait`."""

    def allocate(self, nbytes: int) -> Any:
        """Return memory that torch makes a tensor of; it goes with the last view of it."""

    def bring(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        """Move pages to the device."""

    def send_back(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        """Move pages to the host; those that were advised are there, and only leave the device."""

    def begin_ahead(self) -> None:
        """Have what is `ahead` from now on wait for what has been launched so far."""

    def wait(self) -> None:
        """Have whatever computes next wait for all that is `ahead`."""

    def advise(self, pages: Sequence[Pages], advised: bool) -> None:
        """Say, or take back, that pages are only read and belong on the host; none of them is on the device."""

    @property
    def faults(self) -> int | None:
        """Return the pages that came because they were touched; None: nobody counts them."""


def joined(pages: Iterable[Pages]) -> list[Pages]:
    """Return the same pages as few ranges: those beside each other as one."""
    found: list[Pages] = []
    for each in sorted(pages):
        if found and found[-1].address + found[-1].nbytes == each.address:
            found[-1] = Pages(found[-1].address, found[-1].nbytes + each.nbytes)
        else:
            found.append(each)
    return found


def padded(nbytes: int, page: int) -> int:
    """Return the bytes of the whole pages that hold n bytes."""
    return -(-nbytes // page) * page
