"""The link between device blocks and host memory: the interface of all links, and their common parts.

A link moves bytes without interpreting them. It makes no decisions either: the caller has to ensure that the blocks and
slots of a copy are not freed, reused or evicted before the copy returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from spillover.kernels.huge_pages import address_of


class DeviceLink(Protocol):
    """A copier between blocks of a device pool and slots of host memory. copy_* block, and may be called concurrently.

    A link does not wait for steps: a copy may be started only after all steps that access its blocks have completed.
    """

    block_bytes: int  # bytes of a block on the device
    slot_bytes: int  # bytes of a block in host memory, which a codec may reduce

    def allocate(self, nbytes: int) -> memoryview:
        """Allocate writable, page-aligned memory that is fast for this link; it is freed with the link."""
        ...

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None: ...

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class BlockCodec(Protocol):
    """A codec that narrows blocks when they are copied to host memory, and widens them when they are restored."""

    @property
    def slot_bytes(self) -> int: ...

    def encode(self, block: memoryview, slot: memoryview) -> None: ...

    def decode(self, slot: memoryview, block: memoryview) -> None: ...


class Runs(NamedTuple):
    """A copy as few large pieces: blocks [block, block + count) whose slots are contiguous from an address on."""

    blocks: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class SlotViews(Sequence[memoryview]):
    """The slots of a copy. Their addresses are stored, so that a link that needs only these creates no views."""

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
    """A checker of copy arguments, which merges contiguous blocks and slots into runs."""

    def __init__(self, num_blocks: int, slot_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._slot_bytes = slot_bytes

    def runs(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> Runs:
        """Return the runs of a copy; ValueError if it would access memory outside of the pool or a slot, or block 0."""
        if len(blocks) != len(slots):
            raise ValueError(f"{len(blocks)} blocks and {len(slots)} slots")
        if not blocks:
            return Runs(*(np.empty(0, dtype=np.int64) for _ in range(3)))
        ids, addresses = np.array(blocks, dtype=np.int64), self._addresses(slots)
        if ids.min() < 1 or ids.max() > self._num_blocks:
            raise ValueError(f"blocks {ids.min()} to {ids.max()} of 1 to {self._num_blocks}")
        breaks = (ids[1:] - ids[:-1] != 1) | (addresses[1:] - addresses[:-1] != self._slot_bytes)
        if breaks.all():
            return Runs(ids, addresses, np.ones(len(ids), dtype=np.int64))
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        counts = np.diff(np.append(starts, len(ids)))
        return Runs(ids[starts], addresses[starts], counts)

    def _addresses(self, slots: Sequence[memoryview]) -> npt.NDArray[np.int64]:
        for size in {slots.slot_bytes} if isinstance(slots, SlotViews) else {slot.nbytes for slot in slots}:
            if size != self._slot_bytes:
                raise ValueError(f"a slot of {size} bytes and not {self._slot_bytes}")
        if isinstance(slots, SlotViews):
            return slots.addresses
        return np.array([address_of(slot) for slot in slots], dtype=np.int64)
