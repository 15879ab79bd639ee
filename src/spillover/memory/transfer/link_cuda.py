"""The link of a CUDA device: copies blocks to and from pinned host memory; a codec on the device may narrow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spillover.memory.transfer.cuda_driver import Addresses
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link import Runs, SlotMap
from spillover.memory.transfer.link_queue import Priority

CODEC_BYTES = 32 << 20  # bytes of blocks that are encoded or decoded at a time, as their codes need device memory


class TensorCodec(Protocol):
    """A codec that narrows and widens blocks on the device."""

    @property
    def slot_bytes(self) -> int: ...

    def encode_pool(self, pool: Tensor, blocks: Tensor) -> Tensor:
        """Encode blocks [n] int64 of a pool [num_blocks, block_bytes] uint8 -> [n, slot_bytes] uint8."""
        ...

    def decode_pool(self, slots: Tensor, pool: Tensor, blocks: Tensor) -> None: ...


class CudaLink:
    """A link whose copies of one direction share a stream; a thread that waits for its copy does not block others."""

    def __init__(self, pool: Tensor, transfers: CudaTransfers, codec: TensorCodec | None = None) -> None:
        """Create a link. `pool` [num_blocks + 1, ...]: all blocks, the dummy block 0 first."""
        if not (pool.is_cuda and pool.is_contiguous()):
            raise ValueError("a contiguous pool on a CUDA device is needed")
        self._pool = pool.view(pool.shape[0], -1).view(torch.uint8)  # [num_blocks + 1, block_bytes]
        self._codec = codec
        self.block_bytes = self._pool.shape[1]
        self.slot_bytes = self.block_bytes if codec is None else codec.slot_bytes
        self._slots = SlotMap(pool.shape[0] - 1, self.slot_bytes)
        self._transfers = transfers

    def allocate(self, nbytes: int) -> memoryview:
        """Allocate memory, which the first copy that uses it pins on its own thread, as pinning is slow."""
        return self._transfers.pool.allocate(nbytes, "kv")

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        runs = self._slots.runs(blocks, slots)
        if self._codec is None:
            self._copy(runs, self._places(runs), Priority.SPILL)
            return
        with torch.cuda.stream(self._transfers.stream(Priority.SPILL)), torch.inference_mode():
            for part in self._parts(blocks, slots):
                codes = self._codec.encode_pool(self._pool, torch.tensor(part[0], device=self._pool.device))
                runs = self._slots.runs(*part)
                self._copy(runs, _rows(codes, runs), Priority.SPILL)

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        runs = self._slots.runs(blocks, slots)
        if self._codec is None:
            self._copy(runs, self._places(runs), Priority.RESTORE)
            return
        with torch.cuda.stream(self._transfers.stream(Priority.RESTORE)), torch.inference_mode():
            for part in self._parts(blocks, slots):
                runs = self._slots.runs(*part)
                codes = torch.empty(len(part[0]), self.slot_bytes, dtype=torch.uint8, device=self._pool.device)
                self._copy(runs, _rows(codes, runs), Priority.RESTORE)
                self._codec.decode_pool(codes, self._pool, torch.tensor(part[0], device=self._pool.device))
                self._transfers.finish(Priority.RESTORE)

    def close(self) -> None:
        """Release the slots' memory; no copy may be running."""
        self._transfers.pool.release("kv")

    def _copy(self, runs: Runs, device: Addresses, priority: Priority) -> None:
        """Copy the runs, and return when done."""
        host, sizes = runs.addresses.astype(np.uint64), (runs.counts * self.slot_bytes).astype(np.uint64)
        targets, sources = (host, device) if priority is Priority.SPILL else (device, host)
        self._transfers.copy(targets, sources, sizes, host, priority)

    def _places(self, runs: Runs) -> Addresses:
        return (self._pool.data_ptr() + runs.blocks * self.block_bytes).astype(np.uint64)

    def _parts(self, blocks: Sequence[int], slots: Sequence[memoryview]
               ) -> list[tuple[Sequence[int], Sequence[memoryview]]]:
        """Split a copy into parts of at most CODEC_BYTES."""
        most = max(1, CODEC_BYTES // self.block_bytes)
        return [(blocks[start : start + most], slots[start : start + most]) for start in range(0, len(blocks), most)]


def _rows(codes: Tensor, runs: Runs) -> Addresses:
    """Return the address of each run's codes, which are contiguous in the order of the runs."""
    starts = np.cumsum(runs.counts) - runs.counts
    return (codes.data_ptr() + starts * codes.stride(0)).astype(np.uint64)
