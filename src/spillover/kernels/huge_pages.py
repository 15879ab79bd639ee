"""Host memory in huge pages: read through at every step, pages of 4 KiB would cost a tenth of the time in address
translations alone."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

PAGE = 4096
HUGE_PAGE = 2 << 20


def map_pages(nbytes: int) -> memoryview:
    """Map zeroed memory that takes no room before it is touched, and goes with the last view of it.

    It begins at a huge page where it fills one, and a page behind it is never touched: no two mappings lie side by
    side, so that no copy reaches from one into the next.
    """
    if nbytes < HUGE_PAGE:
        return memoryview(_map(_rounded(nbytes, PAGE) + PAGE))[:nbytes]
    memory = memoryview(_map(_rounded(nbytes, HUGE_PAGE) + HUGE_PAGE))
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.obj.madvise(advice)  # type: ignore[attr-defined]
    start = -address_of(memory) % HUGE_PAGE
    return memory[start : start + nbytes]


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
