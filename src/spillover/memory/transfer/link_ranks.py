"""The link of a model whose KV heads are in the pools of several ranks, all in main memory: a slot has a whole block.

A block of the whole model is [layers * 2, KV heads, bytes of a head], as with a single rank, so a block stored with
one number of ranks can be restored with any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.link import BlockCodec, SlotMap
from spillover.memory.transfer.link_queue import Priority, QueuedCopy

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RankPool:
    """A rank's pool, which this process can read and write."""

    memory: memoryview  # bytes of all blocks, the dummy block 0 first
    heads: range  # indices of its KV heads among those of the whole model


class RanksLink:
    """A DeviceLink between the blocks of all ranks' pools and slots of host memory.

    If several ranks have the same head, the first of them is read and all are written.
    """

    def __init__(self, pools: Sequence[RankPool], rows: int, num_heads: int, head_bytes: int, transfers: CpuTransfers,
                 codec: BlockCodec | None = None) -> None:
        """Create a link. `rows`: number of layers of a block, times 2 for keys and values. `num_heads`: KV heads of the
        whole model. `head_bytes`: bytes of one head in a row. `codec`: codec of whole blocks."""
        self.block_bytes = rows * num_heads * head_bytes
        self.slot_bytes = self.block_bytes if codec is None else codec.slot_bytes
        self._shape = rows, num_heads, head_bytes
        self._pools = [(np.frombuffer(pool.memory, dtype=np.uint8).reshape(-1, rows, len(pool.heads), head_bytes),
                        slice(pool.heads.start, pool.heads.stop)) for pool in pools]
        counts = {len(pool) for pool, _ in self._pools}
        if len(counts) != 1 or {head for pool in pools for head in pool.heads} != set(range(num_heads)):
            raise ValueError(f"pools of {counts} blocks that hold heads {[pool.heads for pool in pools]}")
        self._slots = SlotMap(counts.pop() - 1, self.slot_bytes)
        self._codec = codec
        self._transfers = transfers

    def allocate(self, nbytes: int) -> memoryview:
        return self._transfers.pool.allocate(nbytes, "kv")

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        self._slots.runs(blocks, slots)  # checks the arguments
        with self._transfers.queue.admit(QueuedCopy(Priority.SPILL, len(blocks) * self.slot_bytes)):
            for block, slot in zip(blocks, slots, strict=True):
                whole = self._whole(slot)
                for pool, heads in reversed(self._pools):  # so that the first pool that has a head is read last
                    whole[:, heads] = pool[block]
                if self._codec is not None:
                    self._codec.encode(whole.reshape(-1).data, slot)

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._slots.runs(blocks, slots)
        with self._transfers.queue.admit(QueuedCopy(Priority.RESTORE, len(blocks) * self.slot_bytes)):
            for block, slot in zip(blocks, slots, strict=True):
                whole = self._whole(slot)
                if self._codec is not None:
                    self._codec.decode(slot, whole.reshape(-1).data)
                for pool, heads in self._pools:
                    pool[block] = whole[:, heads]

    def close(self) -> None:
        """Release the slots' memory; it is freed with the last view of it."""
        self._transfers.pool.release("kv")
        self._pools = []

    def _whole(self, slot: memoryview) -> _Bytes:
        """Return an array of a whole block: the slot itself, or with a codec a buffer for the decoded block."""
        if self._codec is not None:
            return np.empty(self._shape, dtype=np.uint8)
        return np.frombuffer(slot, dtype=np.uint8).reshape(self._shape)
