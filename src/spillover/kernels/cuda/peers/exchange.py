"""Sums, gathers and broadcasts over ranks, which map each other's memory (exchange.cu).

A sum is added up in float32 in the order of ranks, from rank 0 on, so its bits depend on the parts alone. A call is one
kernel, without any work of the hosts, so that CUDA graphs can capture it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from spillover.kernels.cuda.driver.compiled import Module
from spillover.kernels.extents import MOST_RANKS

SOURCE = Path(__file__).parent / "exchange.cu"
BLOCKS = 64  # maximum number of blocks of a call
THREADS = 512
TWO_SHOT_BYTES = 1 << 20  # minimum size of a sum over three or more ranks that takes two shots (exchange.cu)
SUMS = {torch.bfloat16: "sum_bfloat16", torch.float16: "sum_float16", torch.float32: "sum_float32"}


class _Arguments(ctypes.Structure):
    _fields_ = (("x", c_void_p), ("out", c_void_p), ("buffers", c_void_p * MOST_RANKS), ("state", c_void_p),
                ("totals", c_void_p), ("told", c_void_p), ("stop", c_void_p), ("bytes", c_uint64),
                ("capacity", c_uint64), ("stride", c_uint64), ("rank", c_int), ("size", c_int), ("shots", c_int))


def buffer_bytes(size: int, capacity: int) -> int:
    """Return the bytes of a rank's buffer for calls of up to `capacity` bytes; it must be zeroed at first."""
    return size * BLOCKS * 4 + 2 * capacity


class Exchange:
    def __init__(self, rank: int, buffers: Sequence[int], capacity: int, device: torch.device) -> None:
        """Prepare calls with all ranks, which must make the same calls in the same order. `buffers`: addresses of the
        ranks' buffers in this process; `capacity`: maximum bytes of a call, a multiple of 16."""
        self._module = Module(SOURCE, (), device)
        for kernel in (*SUMS.values(), "gather", "broadcast"):  # at first use, a call of another rank may be waiting
            self._module.load(kernel)
        self._state = torch.zeros(4, dtype=torch.int64, device=device)  # calls and blocks, nanoseconds, bytes sent
        self._host = torch.zeros(4, dtype=torch.int64, pin_memory=True)  # calls, nanoseconds, bytes sent, stop
        self._capacity = capacity
        state, host = self._state.data_ptr(), self._host.data_ptr()
        self._arguments = _Arguments(
            buffers=(c_void_p * MOST_RANKS)(*buffers), state=state, totals=state + 8, told=host, stop=host + 24,
            capacity=capacity, rank=rank, size=len(buffers))

    @property
    def calls(self) -> int:
        return int(self._host[0])

    @property
    def seconds(self) -> float:
        """Return the seconds that this rank has waited for the next one."""
        return int(self._host[1]) / 1e9

    def stop(self) -> None:
        """Make calls that wait for a lost rank return; the results of these and of all later calls are garbage."""
        self._host[3] = 1

    @property
    def stopped(self) -> bool:
        """Return whether a call may have returned without waiting for the other ranks."""
        return bool(self._host[3])

    @property
    def bytes(self) -> int:
        """Return the number of bytes that this rank has sent."""
        return int(self._host[2])

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, which overwrites x if x is contiguous."""
        x = x.contiguous()
        size = self._arguments.size
        for part in self._chunks(x):
            self._launch(SUMS[x.dtype], part, shots=2 if size > 2 and part.nbytes >= TWO_SHOT_BYTES else 1)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the x of all ranks on rank 0, and an empty list on the others."""
        x = x.contiguous()
        size, first = self._arguments.size, self._arguments.rank == 0
        stride = -(-x.nbytes // 16) * 16
        out = torch.empty(size if first else 0, stride, dtype=torch.uint8, device=x.device)
        done = 0
        for part in self._chunks(x):
            self._launch("gather", part, out.data_ptr() + done, stride)
            done += part.nbytes
        return [part[:x.nbytes].view(x.dtype).view(x.shape) for part in out]

    def broadcast(self, x: Tensor) -> None:
        """Overwrite the contiguous x of all other ranks with that of rank 0."""
        assert x.is_contiguous()
        for part in self._chunks(x):
            self._launch("broadcast", part)

    def _chunks(self, x: Tensor) -> list[Tensor]:
        run, count = x.view(-1), self._capacity // x.itemsize
        return [run[start:start + count] for start in range(0, len(run), count)]

    def _launch(self, kernel: str, x: Tensor, out: int = 0, stride: int = 0, shots: int = 1) -> None:
        assert x.data_ptr() % 16 == 0, "runs begin at multiples of 16 bytes"
        arguments = self._arguments
        arguments.x, arguments.out, arguments.bytes, arguments.stride = x.data_ptr(), out, x.nbytes, stride
        arguments.shots = shots
        blocks = min(BLOCKS, -(-x.nbytes // (16 * THREADS)))
        self._module.launch(kernel, max(1, blocks), THREADS, arguments)
