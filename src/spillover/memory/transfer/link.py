"""The way between device blocks and host memory: what every link can do, and what links have in common.

A link moves bytes and knows nothing of what they mean. It does not decide either: whoever calls it has made sure that
no one else frees, reuses or evicts the blocks and slots of a copy before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from spillover.kernels.huge_pages import address_of


class DeviceLink(Protocol):
    """Blocks of a device pool, to and from slots of host memory. copy_* block, and may be called on several threads.

    A link does not wait for steps: whoever starts a copy has seen the end of every step that touches its blocks.
    """

    block_bytes: int  # on the device
    slot_bytes: int  # of the same block in host memory; a codec may narrow it

    def allocate(self, nbytes: int) -> memoryview:
        """Hand out writable memory from the start of a page, fast for this link; freed with the link."""
        ...

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None: ...

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class BlockCodec(Protocol):
    """Narrows a block on its way to host memory and widens it on the way back."""

    @property
    def slot_bytes(self) -> int: ...

    def encode(self, block: memoryview, slot: memoryview) -> None: ...

    def decode(self, slot: memoryview, block: memoryview) -> None: ...


class Runs(NamedTuple):
    """A copy as few large pieces: blocks [block, block + count) whose slots lie side by side from an address."""

    blocks: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class SlotViews(Sequence[memoryview]):
    """The slots of a copy. Their addresses are known, so that a link which wants no more makes no view of any."""

    def __init__(self, view: Callable[[int], memoryview], slots: Sequence[int], addresses: npt.NDArray[np.int64],
                 slot_bytes: int) -> None:
        self.addresses = addresses
        self.slot_bytes = slot_bytes
        self._view = view
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[memoryview]:
        return map(self._view, self._slots)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> SlotViews: ...

    def __getitem__(self, index: int | slice) -> memoryview | SlotViews:
        if isinstance(index, slice):
            return SlotViews(self._view, self._slots[index], self.addresses[index], self.slot_bytes)
        return self._view(self._slots[index])


class SlotMap:
    """Checks what a copy names and finds where it lies."""

    def __init__(self, num_blocks: int, slot_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._slot_bytes = slot_bytes

    def runs(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> Runs:
        """Refuses what would write outside of the pool or of a slot; block 0 is the dummy."""
        if len(blocks) != len(slots):
            raise ValueError(f"{len(blocks)} blocks and {len(slots)} slots")
        if not blocks:
            return Runs(*(np.empty(0, dtype=np.int64) for _ in range(3)))
        ids, addresses = np.array(blocks, dtype=np.int64), self._addresses(slots)
        if ids.min() < 1 or ids.max() > self._num_blocks:
            raise ValueError(f"blocks {ids.min()} to {ids.max()} of 1 to {self._num_blocks}")
        apart = (ids[1:] - ids[:-1] != 1) | (addresses[1:] - addresses[:-1] != self._slot_bytes)
        if apart.all():
            return Runs(ids, addresses, np.ones(len(ids), dtype=np.int64))
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        counts = np.diff(np.append(starts, len(ids)))
        return Runs(ids[starts], addresses[starts], counts)

    def _addresses(self, slots: Sequence[memoryview]) -> npt.NDArray[np.int64]:
        for size in {slots.slot_bytes} if isinstance(slots, SlotViews) else {slot.nbytes for slot in slots}:
            if size != self._slot_bytes:
                raise ValueError(f"a slot of {size} bytes and not {self._slot_bytes}")
        if isinstance(slots, SlotViews):
            return slots.addresses
        return np.array([address_of(slot) for slot in slots], dtype=np.int64)
