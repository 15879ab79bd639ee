"""Managed memory emulated on a CPU, where the "device" is what of shared memory is mapped into this process.

Bytes live in the page cache; a page comes when it is touched (a minor fault, which maps its neighbours too) or when it
is populated ahead, and leaves by MADV_DONTNEED. Faults are counted, in pages, from /proc/self/pagemap. The order, the
budget and the faults are those of managed memory; what a fault costs is not, so every number of it is labelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from spillover.kernels.huge_pages import address_of
from spillover.memory.managed.pages import FAULT_AROUND, Pages, padded
from spillover.memory.transfer.link_queue import Priority

PAGE = mmap.PAGESIZE
_DONTNEED = 4
_POPULATE_READ = 22  # Linux 5.14


class Copier(Protocol):
    """Works on a thread of its own: memory.transfer.cpu_transfers."""

    def submit(self, work: Callable[[], None], nbytes: int, priority: Priority) -> Any: ...

    def wait(self, ticket: Any) -> None: ...


class EmulatedMemory:
    """A memory.managed.pages.ManagedMemory."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._pages: list[Pages] = []  # all that were allocated
        self._left = 0  # pages that were mapped when they left
        self._brought = 0  # pages that were mapped by populating
        self._tickets: list[Any] = []
        self._counting = threading.Lock()  # pages and what was counted of them change together
        try:
            self._map: int | None = os.open("/proc/self/pagemap", os.O_RDONLY)
        except OSError:
            self._map = None

    def __del__(self) -> None:
        if self._map is not None:
            os.close(self._map)

    def allocate(self, nbytes: int) -> memoryview:
        file = os.memfd_create("spillover-managed")
        try:
            os.ftruncate(file, nbytes + FAULT_AROUND)
            memory = memoryview(mmap.mmap(file, nbytes + FAULT_AROUND, mmap.MAP_SHARED))
        finally:
            os.close(file)
        start = -address_of(memory) % FAULT_AROUND
        memory = memory[start : start + nbytes]
        self._pages.append(Pages(address_of(memory), nbytes))
        return memory

    def bring(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        self._do(self._populate, pages, ahead)

    def send_back(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        self._do(self._leave, pages, ahead)

    def begin_ahead(self) -> None:
        """Do nothing: what was launched before has been computed."""

    def wait(self) -> None:
        for ticket in self._tickets:
            self._copier.wait(ticket)
        self._tickets.clear()

    def advise(self, pages: Sequence[Pages], advised: bool) -> None:
        """Do nothing: no page is ever written back here."""

    @property
    def faults(self) -> int | None:
        """Return the pages that came by being touched, those that were written at loading among them."""
        if self._map is None:
            return None
        with self._counting:
            return self._left + sum(map(self.mapped, self._pages)) - self._brought

    def mapped(self, pages: Pages) -> int:
        """Return how many of these pages are on the "device"; 0 where the system does not say."""
        if self._map is None:
            return 0
        count = pages.nbytes // PAGE
        with contextlib.suppress(OSError):
            entries = np.frombuffer(os.pread(self._map, 8 * count, pages.address // PAGE * 8), dtype=np.uint64)
            return int((entries >> np.uint64(63)).sum())
        return 0

    def _do(self, work: Callable[[Pages], None], pages: Sequence[Pages], ahead: bool) -> None:
        if ahead:
            nbytes = sum(each.nbytes for each in pages)
            self._tickets.append(self._copier.submit(lambda: self._do(work, pages, False), nbytes, Priority.PREFETCH))
            return
        for each in pages:
            work(each)

    def _populate(self, pages: Pages) -> None:
        pages = Pages(pages.address, padded(pages.nbytes, FAULT_AROUND))  # as much as a fault would bring along
        with self._counting:
            before = self.mapped(pages)
            if self._madvise(pages.address, pages.nbytes, _POPULATE_READ):  # an older system: touched page by page
                memory = memoryview((ctypes.c_ubyte * pages.nbytes).from_address(pages.address))
                np.frombuffer(memory, dtype=np.uint8)[::PAGE].sum()
            self._brought += self.mapped(pages) - before

    def _leave(self, pages: Pages) -> None:
        with self._counting:
            self._left += self.mapped(pages)
            if self._madvise(pages.address, pages.nbytes, _DONTNEED):
                raise OSError(ctypes.get_errno(), "pages could not be sent back")
