"""Host memory in huge pages: where every step reads through all of it, the address translation of 4 KiB pages alone
would take a tenth of the time. All large host memory is mapped here, private or shared by processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

PAGE = 4096
HUGE_PAGE = 2 << 20
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: populates pages, or fails if there is no memory for them


def map_pages(nbytes: int) -> memoryview:
    """Map zeroed memory, which uses no RAM before it is touched and is unmapped with the last view of it.

    It begins at a huge page if it fills at least one. A page after it is never touched: no two mappings are adjacent,
    so that no copy extends from one into the next.
    """
    if nbytes < HUGE_PAGE:
        return memoryview(_map(_rounded(nbytes, PAGE) + PAGE))[:nbytes]
    memory = memoryview(_in_huge_pages(_map(_rounded(nbytes, HUGE_PAGE) + HUGE_PAGE)))
    start = -address_of(memory) % HUGE_PAGE
    return memory[start : start + nbytes]


def make_file(name: str, nbytes: int) -> int:
    """Make a file in memory for several processes to map, and return its descriptor. No process can change its size,
    and it uses no RAM before it is touched."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a file in memory, which is shared by all processes that map it."""
    return _in_huge_pages(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED))


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _in_huge_pages(mapped: mmap.mmap) -> mmap.mmap:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # the system has no huge pages
            mapped.madvise(advice)
    return mapped


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
