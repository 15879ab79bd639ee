"""The link where the device is the CPU: blocks are copied from memory to memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from spillover.memory.transfer.link import BlockCodec, SlotMap, address_of, map_memory


class CpuLink:
    """A pool in main memory. ctypes gives the interpreter to other threads while bytes move."""

    def __init__(self, pool: memoryview, block_bytes: int, codec: BlockCodec | None = None) -> None:
        """`pool`: all blocks, the dummy block 0 first, as bytes that are kept alive by this view."""
        if pool.nbytes % block_bytes or pool.readonly:
            raise ValueError(f"a writable pool of whole blocks is needed, not {pool.nbytes} bytes in {block_bytes}")
        self.block_bytes = block_bytes
        self.slot_bytes = block_bytes if codec is None else codec.slot_bytes
        self._pool = pool
        self._base = address_of(pool)
        self._slots = SlotMap(pool.nbytes // block_bytes - 1, self.slot_bytes)
        self._codec = codec
        self._memory: list[mmap.mmap] = []

    def allocate(self, nbytes: int) -> memoryview:
        memory = map_memory(nbytes)
        self._memory.append(memory)
        return memoryview(memory)[:nbytes]

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        runs = self._slots.runs(blocks, slots)
        if self._codec is None:
            for block, slot, count in zip(*(array.tolist() for array in runs), strict=True):
                ctypes.memmove(slot, self._base + block * self.block_bytes, count * self.block_bytes)
        else:
            for block, view in zip(blocks, slots, strict=True):
                self._codec.encode(self._block(block), view)

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        runs = self._slots.runs(blocks, slots)
        if self._codec is None:
            for block, slot, count in zip(*(array.tolist() for array in runs), strict=True):
                ctypes.memmove(self._base + block * self.block_bytes, slot, count * self.block_bytes)
        else:
            for block, view in zip(blocks, slots, strict=True):
                self._codec.decode(view, self._block(block))

    def close(self) -> None:
        """The memory goes once the last view of it does."""
        self._memory.clear()

    def _block(self, block: int) -> memoryview:
        return self._pool[block * self.block_bytes : (block + 1) * self.block_bytes]
