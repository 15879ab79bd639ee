"""Host memory in huge pages: where every step reads through all of it, the address translation of 4 KiB pages alone
would take a tenth of the time."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

PAGE = 4096
HUGE_PAGE = 2 << 20


def map_pages(nbytes: int) -> memoryview:
    """Map zeroed memory, which uses no RAM before it is touched and is unmapped with the last view of it.

    It begins at a huge page if it fills at least one. A page after it is never touched: no two mappings are adjacent,
    so that no copy extends from one into the next.
    """
    if nbytes < HUGE_PAGE:
        return memoryview(_map(_rounded(nbytes, PAGE) + PAGE))[:nbytes]
    memory = memoryview(_map(_rounded(nbytes, HUGE_PAGE) + HUGE_PAGE))
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # the system has no huge pages
            memory.obj.madvise(advice)  # type: ignore[attr-defined]
    start = -address_of(memory) % HUGE_PAGE
    return memory[start : start + nbytes]


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
