"""The link of a CUDA device: blocks to and from pinned host memory, each direction on a stream of its own.

This is the one file of its room that knows torch, for streams and for the codec, which runs on the device.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spillover.kernels import native
from spillover.memory.transfer.cuda_driver import Addresses, cuda_driver
from spillover.memory.transfer.link import PAGE, Runs, SlotMap, address_of, map_memory

CODEC_BYTES = 32 << 20  # of blocks that are encoded or decoded at a time: their codes take device memory meanwhile


class TensorCodec(Protocol):
    """Narrows blocks on the device."""

    @property
    def slot_bytes(self) -> int: ...

    def encode_pool(self, pool: Tensor, blocks: Tensor) -> Tensor:
        """These blocks [n] int64 of a pool [num_blocks, block_bytes] uint8 -> [n, slot_bytes] uint8."""
        ...

    def decode_pool(self, slots: Tensor, pool: Tensor, blocks: Tensor) -> None: ...


class CudaLink:
    """Copies of one direction share a stream; a thread that waits for its own does not keep the next from starting."""

    def __init__(self, pool: Tensor, codec: TensorCodec | None) -> None:
        """`pool` [num_blocks + 1, ...]."""
        if not (pool.is_cuda and pool.is_contiguous()):
            raise ValueError("a contiguous pool on a CUDA device is needed")
        self._pool = pool.view(pool.shape[0], -1).view(torch.uint8)  # [num_blocks + 1, block_bytes]
        self._codec = codec
        self.block_bytes = self._pool.shape[1]
        self.slot_bytes = self.block_bytes if codec is None else codec.slot_bytes
        self._slots = SlotMap(pool.shape[0] - 1, self.slot_bytes)
        self._out = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._driver = cuda_driver()
        self._table = self._driver.table()
        self._context = self._driver.context(pool.device.index or 0)
        self._thread = threading.local()  # its event
        self._memory: list[tuple[int, mmap.mmap]] = []  # and its address

    def allocate(self, nbytes: int) -> memoryview:
        """The memory is pinned by the first copy that meets it, on that copy's thread: pinning takes milliseconds."""
        # A page that is never touched keeps slabs apart, so that no copy reaches from one into the next.
        memory = map_memory(nbytes + PAGE)
        view = memoryview(memory)[:nbytes]
        self._memory.append((address_of(view), memory))
        self._driver.own(address_of(view), -(-nbytes // PAGE) * PAGE)
        return view

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        runs = self._slots.runs(blocks, slots)
        if self._codec is None:
            self._copy(runs, self._places(runs), self._out, inwards=False)
            return
        with torch.cuda.stream(self._out), torch.inference_mode():
            for part in self._parts(blocks, slots):
                codes = self._codec.encode_pool(self._pool, torch.tensor(part[0], device=self._pool.device))
                runs = self._slots.runs(*part)
                self._copy(runs, _rows(codes, runs), self._out, inwards=False)

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        runs = self._slots.runs(blocks, slots)
        if self._codec is None:
            self._copy(runs, self._places(runs), self._in, inwards=True)
            return
        with torch.cuda.stream(self._in), torch.inference_mode():
            for part in self._parts(blocks, slots):
                runs = self._slots.runs(*part)
                codes = torch.empty(len(part[0]), self.slot_bytes, dtype=torch.uint8, device=self._pool.device)
                self._copy(runs, _rows(codes, runs), self._in, inwards=True)
                self._codec.decode_pool(codes, self._pool, torch.tensor(part[0], device=self._pool.device))
                self._driver.finish(self._in.cuda_stream, self._event())

    def close(self) -> None:
        """No copy may be running."""
        self._driver.set_context(self._context)
        for address, _ in self._memory:
            self._driver.disown(address)
        self._memory.clear()

    def _copy(self, runs: Runs, device: Addresses, stream: torch.cuda.Stream, inwards: bool) -> None:
        """Returns when the bytes are there."""
        host, sizes = runs.addresses.astype(np.uint64), (runs.counts * self.slot_bytes).astype(np.uint64)
        targets, sources = (device, host) if inwards else (host, device)
        done = self._event()
        pinned = self._driver.pin(runs.addresses)
        library = native.library()
        if library is not None:
            code = library.cuda_copy(ctypes.byref(self._table), self._context, None, targets.ctypes.data,
                                     sources.ctypes.data, sizes.ctypes.data, len(sizes), stream.cuda_stream, done,
                                     pinned)
            if code:
                raise RuntimeError(f"a copy over the link failed with CUDA error {code}")
            return
        self._driver.copy(targets, sources, sizes, stream.cuda_stream, pinned)
        self._driver.finish(stream.cuda_stream, done)

    def _event(self) -> int:
        """This thread's, which nobody else records; the device's context is the thread's from then on."""
        if not hasattr(self._thread, "event"):
            self._driver.set_context(self._context)
            self._thread.event = self._driver.make_event()
        return int(self._thread.event)

    def _places(self, runs: Runs) -> Addresses:
        return (self._pool.data_ptr() + runs.blocks * self.block_bytes).astype(np.uint64)

    def _parts(self, blocks: Sequence[int], slots: Sequence[memoryview]
               ) -> list[tuple[Sequence[int], Sequence[memoryview]]]:
        """As much as the codec takes at a time."""
        most = max(1, CODEC_BYTES // self.block_bytes)
        return [(blocks[start : start + most], slots[start : start + most]) for start in range(0, len(blocks), most)]


def _rows(codes: Tensor, runs: Runs) -> Addresses:
    """Where the codes of each run begin; they lie in the order of the runs."""
    starts = np.cumsum(runs.counts) - runs.counts
    return (codes.data_ptr() + starts * codes.stride(0)).astype(np.uint64)
