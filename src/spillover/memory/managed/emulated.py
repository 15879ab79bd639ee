"""Managed memory emulated on a CPU: the "device" is the part of shared memory that is mapped into this process.

Bytes are in the page cache; a page is mapped when it is touched (a minor fault, which maps its neighbours too) or when
it is populated in advance, and unmapped by MADV_DONTNEED. Faults are counted, in pages, from /proc/self/pagemap. Order,
budget and faults are those of managed memory; the cost of a fault is not, so all its measurements are labelled.
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
    """An executor of copies on a separate thread: memory.transfer.cpu_transfers."""

    def submit(self, work: Callable[[], None], nbytes: int, priority: Priority) -> Any: ...

    def wait(self, ticket: Any) -> None: ...


class EmulatedMemory:
    """A memory.managed.pages.ManagedMemory."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._pages: list[Pages] = []  # all allocated ranges
        self._evicted = 0  # number of mapped pages that were sent back
        self._populated = 0  # number of pages that populating mapped
        self._tickets: list[Any] = []
        self._leaving: list[Any] = []  # those of evictions
        self._counting = threading.Lock()  # pages and their counts change together
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

    def to_device(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        if not ahead:  # the room for these pages may be that of pages which are still to be evicted
            for ticket in self._leaving:
                self._copier.wait(ticket)
            self._leaving.clear()
        self._do(self._populate, pages, ahead)

    def to_host(self, pages: Sequence[Pages], ahead: bool = False) -> None:
        self._do(self._evict, pages, ahead)
        if ahead:
            self._leaving.append(self._tickets[-1])

    def begin_prefetch(self) -> None:
        """Do nothing: all earlier launches have completed."""

    def wait(self) -> None:
        for ticket in self._tickets:
            self._copier.wait(ticket)
        self._tickets.clear()
        self._leaving.clear()

    def advise(self, pages: Sequence[Pages], advised: bool) -> None:
        """Do nothing: pages are never written back in the emulation."""

    @property
    def faults(self) -> int | None:
        """Return the number of pages mapped because they were touched, including those written while loading."""
        if self._map is None:
            return None
        with self._counting:
            return self._evicted + sum(map(self.mapped, self._pages)) - self._populated

    def mapped(self, pages: Pages) -> int:
        """Return how many of these pages are on the "device"; 0 if the system does not report it."""
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
        pages = Pages(pages.address, padded(pages.nbytes, FAULT_AROUND))  # the same range as a fault maps
        with self._counting:
            before = self.mapped(pages)
            if self._madvise(pages.address, pages.nbytes, _POPULATE_READ):  # an older kernel: touch page by page
                memory = memoryview((ctypes.c_ubyte * pages.nbytes).from_address(pages.address))
                np.frombuffer(memory, dtype=np.uint8)[::PAGE].sum()
            self._populated += self.mapped(pages) - before

    def _evict(self, pages: Pages) -> None:
        with self._counting:
            self._evicted += self.mapped(pages)
            if self._madvise(pages.address, pages.nbytes, _DONTNEED):
                raise OSError(ctypes.get_errno(), "pages could not be sent back")
