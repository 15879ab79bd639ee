"""The interface through which weights in managed memory move their pages, on any device; and ranges of pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

FAULT_AROUND = 64 << 10  # maximum bytes that a fault on file pages maps, by the system's default


class Pages(NamedTuple):
    """A range of whole pages."""

    address: int
    nbytes: int


class ManagedMemory(Protocol):
    """Memory whose pages are on the device or the host. A call takes effect before the next kernels, unless it is
    `ahead`: then it starts after the work launched so far and runs concurrently with later work until `wait`."""

    def allocate(self, nbytes: int) -> Any:
        """Return memory that torch can make a tensor of; it is freed with the last view of it."""

    def to_device(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        """Move pages to the device."""

    def to_host(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        """Move pages to the host; advised pages have a copy on the host and only leave the device."""

    def begin_prefetch(self) -> None:
        """Make later `ahead` calls wait for the work launched so far."""

    def wait(self) -> None:
        """Make later kernels wait for all `ahead` calls so far."""

    def advise(self, pages: Sequence[Pages], advised: bool) -> None:
        """Set or clear the advice that pages are only read and belong on the host; none may be on the device."""

    @property
    def faults(self) -> int | None:
        """Return the number of pages that moved because they were touched; None if it is not counted."""


def joined(pages: Iterable[Pages]) -> list[Pages]:
    """Merge adjacent ranges; return the same pages as fewer ranges."""
    found: list[Pages] = []
    for each in sorted(pages):
        if found and found[-1].address + found[-1].nbytes == each.address:
            found[-1] = Pages(found[-1].address, found[-1].nbytes + each.nbytes)
        else:
            found.append(each)
    return found


def padded(nbytes: int, page: int) -> int:
    """Round nbytes up to whole pages."""
    return -(-nbytes // page) * page
