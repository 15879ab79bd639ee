"""The link if the device is the CPU: blocks are copied from memory to memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from spillover.kernels.huge_pages import address_of
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.link import BlockCodec, SlotMap
from spillover.memory.transfer.link_queue import Priority, QueuedCopy


class CpuLink:
    """The link of a pool in main memory. ctypes releases the GIL during copies."""

    def __init__(self, pool: memoryview, block_bytes: int, transfers: CpuTransfers,
                 codec: BlockCodec | None = None) -> None:
        """Create a link. `pool`: bytes of all blocks, the dummy block 0 first; the link keeps this memory alive."""
        if pool.nbytes % block_bytes or pool.readonly:
            raise ValueError(f"a writable pool of whole blocks is needed, not {pool.nbytes} bytes in {block_bytes}")
        self.block_bytes = block_bytes
        self.slot_bytes = block_bytes if codec is None else codec.slot_bytes
        self._pool = pool
        self._base = address_of(pool)
        self._slots = SlotMap(pool.nbytes // block_bytes - 1, self.slot_bytes)
        self._codec = codec
        self._transfers = transfers

    def allocate(self, nbytes: int) -> memoryview:
        return self._transfers.pool.allocate(nbytes, "kv")

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        runs = self._slots.runs(blocks, slots)
        with self._transfers.queue.admit(QueuedCopy(Priority.SPILL, len(blocks) * self.slot_bytes)):
            if self._codec is None:
                for block, slot, count in zip(*(array.tolist() for array in runs), strict=True):
                    ctypes.memmove(slot, self._base + block * self.block_bytes, count * self.block_bytes)
            else:
                for block, view in zip(blocks, slots, strict=True):
                    self._codec.encode(self._block(block), view)

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        runs = self._slots.runs(blocks, slots)
        with self._transfers.queue.admit(QueuedCopy(Priority.RESTORE, len(blocks) * self.slot_bytes)):
            if self._codec is None:
                for block, slot, count in zip(*(array.tolist() for array in runs), strict=True):
                    ctypes.memmove(self._base + block * self.block_bytes, slot, count * self.block_bytes)
            else:
                for block, view in zip(blocks, slots, strict=True):
                    self._codec.decode(view, self._block(block))

    def close(self) -> None:
        """Release the slots' memory; it is freed with the last view of it."""
        self._transfers.pool.release("kv")

    def _block(self, block: int) -> memoryview:
        return self._pool[block * self.block_bytes : (block + 1) * self.block_bytes]
