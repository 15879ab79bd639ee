"""Host memory that weights live in when the device is too small for them; pinned where there is a CUDA device.

The device holds copies only, so what is here never changes after loading.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor

from spillover.errors import SpilloverError

log = logging.getLogger("spillover.engine")

LARGE_PAGE = 2 << 20
POPULATED_AT_ONCE = 256 << 20  # of a run, by one thread
_POPULATE_WRITE = 23  # Linux 5.14; older ones refuse, which does no harm
_THREADS = 8


class HostWeights:
    keeps: ClassVar[bool] = False  # whether runs are kept for the next home of this process: pinning takes seconds
    _kept: ClassVar[dict[int, list[Tensor]]] = {}

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._registered: list[int] = []
        self._runs: list[Tensor] = []
        self._pool = ThreadPoolExecutor(_THREADS, "spillover-home")
        self._expected: deque[tuple[int, Future[Tensor]]] = deque()
        self.nbytes = 0

    def expect(self, nbytes: int, count: int) -> None:
        """So many runs of that size will be asked for: they are made meanwhile, which takes seconds for many."""
        count -= len(self._kept.get(nbytes, ()))
        if self._cuda and count > 0:
            self._expected += [(nbytes, self._pool.submit(self._make, nbytes, False)) for _ in range(count)]

    def run(self, nbytes: int) -> Tensor:
        """Bytes [nbytes], from the start of a large page."""
        self.nbytes += nbytes
        if self._kept.get(nbytes):
            run = self._kept[nbytes].pop()
        elif self._expected and self._expected[0][0] == nbytes:
            run = self._expected.popleft()[1].result()
        else:
            run = self._make(nbytes, True)
        if self.keeps:
            self._runs.append(run)
        return run

    def close(self) -> None:
        for _, expected in self._expected:
            expected.result()
        self._pool.shutdown()
        if self.keeps:
            for run in self._runs:
                self._kept.setdefault(run.numel(), []).append(run)
            self._runs.clear()
            return
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._registered.clear()

    def _make(self, nbytes: int, spread: bool) -> Tensor:
        size = -(-nbytes // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            with contextlib.suppress(OSError):
                memory.madvise(advice)
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        run = whole[-whole.data_ptr() % LARGE_PAGE :][: -(-nbytes // LARGE_PAGE) * LARGE_PAGE]
        if self._cuda:
            self._pin(run, spread)
        return run[:nbytes]

    def _pin(self, run: Tensor, spread: bool) -> None:
        address, nbytes = run.data_ptr(), run.numel()
        pieces = [(address + start, min(POPULATED_AT_ONCE, nbytes - start))
                  for start in range(0, nbytes, POPULATED_AT_ONCE)]
        for done in self._pool.map(_populate, pieces) if spread else map(_populate, pieces):
            assert done is None
        code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
        if int(code) != 0:
            raise SpilloverError(f"{nbytes:,} bytes of host memory for weights could not be pinned (CUDA error "
                                 f"{int(code)}); raise the limit of locked memory (ulimit -l) or --gpu-memory")
        self._registered.append(address)


def _populate(piece: tuple[int, int]) -> None:
    """Makes the pages now, many threads at once: pinning would make them one after another."""
    address, nbytes = piece
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE)
