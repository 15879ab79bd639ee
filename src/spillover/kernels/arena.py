"""Memory for what stays on a CPU and is streamed through at every step: weights and the KV pool.

It comes in large pages where the system gives them. Reading a model's weights touches every page once a step, and with
pages of 4 KiB the translations alone cost more than a tenth of the time.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
CHUNK = 64 << 20
_LINE = 64  # bytes: what vectors are aligned to


class Arena:
    """Hands out float32 tensors one after the other; a chunk is given back once none of its tensors is left."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0)
        self._used = 0  # elements

    def empty(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if self._used + count > self._chunk.numel():
            self._chunk, self._used = _map(max(CHUNK, count * 4)), 0
        tensor = self._chunk[self._used : self._used + count].view(shape)
        self._used += -(-count * 4 // _LINE) * _LINE // 4
        return tensor


def _map(nbytes: int) -> Tensor:
    """At least nbytes of zeros, from the start of a large page."""
    size = -(-nbytes // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.float32)  # keeps the mapping
    return whole[-whole.data_ptr() % LARGE_PAGE // 4 :]
