"""The host tier's memory: slots of one block each, and the map from stored blocks to slots.

A slot is written by one copy at a time and read by any number; `pins` counts its users. Everything here is called on
the engine's thread; the copies themselves run on other threads, on the memory that `view` returns.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from spillover.kernels.huge_pages import address_of
from spillover.memory.kv.events import NO_BLOCK_EVENTS, BlockEvents
from spillover.memory.transfer.link import SlotViews

# Host memory is allocated in at most this many slabs, of at least this size each. Pinning a slab blocks the device's
# driver for 0.2 ms per megabyte: that of a small slab is hidden by the step that runs in the meantime.
MAX_SLABS = 8192
SLAB_BYTES = 8 << 20


class Slots:
    """Slots of equal size in host memory, allocated a slab at a time when first needed and never freed."""

    def __init__(self, allocate: Callable[[int], memoryview], slot_bytes: int, limit: int) -> None:
        self.limit = limit
        self.slot_bytes = slot_bytes
        self._allocate = allocate
        self._stride = -(-slot_bytes // 4096) * 4096  # multiple of 4096, so that a disk can read directly into a slot
        self._per_slab = max(1, max(SLAB_BYTES, limit * self._stride // MAX_SLABS) // self._stride)
        self._slabs: list[memoryview] = []  # the last may be shorter; no object per slot, for fewer garbage collections
        self._addresses: npt.NDArray[np.int64] = np.empty(limit, dtype=np.int64)  # address of each slot below _count
        self._count = 0  # number of slots allocated so far
        self._free: list[int] = []

    @property
    def free(self) -> int:
        """Return the number of slots that acquire() can still return."""
        return len(self._free) + self.limit - self._count

    @property
    def used(self) -> int:
        return self._count - len(self._free)

    def acquire(self) -> int | None:
        if not self._free and self._count < self.limit:
            self._grow()
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        slab, place = divmod(slot, self._per_slab)
        return self._slabs[slab][place * self._stride : place * self._stride + self.slot_bytes]

    def addresses(self, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the addresses of slots; ValueError if one of them was never acquired."""
        ids = np.asarray(slots, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._count:
            raise ValueError(f"slots {ids.min()} to {ids.max()} of the {self._count} in host memory")
        return self._addresses[ids]

    def views(self, slots: list[int]) -> SlotViews:
        return SlotViews(self.view, slots, self._addresses[slots], self.slot_bytes)

    def _grow(self) -> None:
        first = self._count
        count = min(self._per_slab, self.limit - first)
        try:
            slab = self._allocate(count * self._stride)
        except (MemoryError, OSError, RuntimeError):  # RuntimeError: the driver refuses to pin the memory
            self.limit = first  # continue with the slots allocated so far
            return
        self._slabs.append(slab)
        self._count += count
        self._addresses[first : self._count] = address_of(slab) + np.arange(count) * self._stride
        self._free.extend(reversed(range(first, self._count)))

    def check(self) -> None:
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert self.used + self.free == self.limit


class Entry:
    """A stored block in a slot, which is being written or ready to be read."""

    __slots__ = ("forgotten", "key", "pins", "private", "ready", "safe", "slot", "writes")

    def __init__(self, key: bytes, slot: int) -> None:
        self.key = key
        self.slot = slot  # slot of the block; -1 once the entry is dropped
        self.ready = False
        self.private = False  # whether it belongs to one live sequence and no other can find it
        self.forgotten = False  # whether it can no longer be found, and is dropped with its last pin
        self.pins = 0  # number of copies and restores that use the slot
        self.safe = False  # whether it may be evicted without loss: the tiers below have it, or there are none
        self.writes = 0  # number of pins that are writes to a tier below

    @property
    def found(self) -> bool:
        """Return whether a lookup finds the entry."""
        return self.ready and not self.private and not self.forgotten


class HostCache:
    """The entries of the host tier by key, least recently used first; never more than there are slots."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.evictions = 0
        self.dropped = 0  # number of evicted blocks that no tier below had
        self._idle = 0  # number of entries that are safe and not pinned
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._unsafe: OrderedDict[bytes, Entry] = OrderedDict()  # ready entries that no tier below has; same order
        self._renamed = 0
        self.events: BlockEvents = NO_BLOCK_EVENTS

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.forgotten else entry

    def use(self, key: bytes) -> Entry | None:
        """Return the entry and make it the most recently used one; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.forgotten:
            return None
        self._entries.move_to_end(key)
        if self._unsafe and key in self._unsafe:
            self._unsafe.move_to_end(key)
        return entry

    def reserve(self, key: bytes, lossy: bool = True) -> Entry | None:
        """Create an entry that is not ready and pinned once for the copy that fills it; None if no slot is available.
        `lossy`: a block that no tier below has may be evicted for it."""
        assert self.get(key) is None, "the block is in host memory or on its way there already"
        slot = self.slots.acquire()
        if slot is None and self._evict_one(lossy):
            slot = self.slots.acquire()
        if slot is None:
            return None
        if key in self._entries:
            self._rename_forgotten(self._entries[key])
        entry = self._entries[key] = Entry(key, slot)
        entry.pins = 1
        return entry

    def mark_ready(self, entry: Entry, safe: bool) -> None:
        """Mark an entry ready, as its bytes have been written; it is still pinned for the copy that wrote them."""
        assert entry.pins
        entry.ready = True
        if safe:
            entry.safe = True
        else:
            self._unsafe[entry.key] = entry
        if entry.found:
            self.events.stored("host", entry.key)

    def mark_safe(self, entry: Entry) -> None:
        self._idle += entry.pins == 0 and not entry.safe
        entry.safe = True
        self._unsafe.pop(entry.key, None)

    def mark_unsafe(self, entry: Entry) -> None:
        """Mark an entry as not stored in the tiers below."""
        assert entry.ready
        self._idle -= entry.pins == 0 and entry.safe
        entry.safe = False
        self._unsafe[entry.key] = entry

    def pin(self, entry: Entry) -> None:
        """Keep the entry's slot from being reused until unpin()."""
        self._idle -= entry.pins == 0 and entry.safe
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        self._idle += entry.pins == 0 and entry.safe

    def drop(self, entry: Entry) -> None:
        """Remove an entry that is not pinned, and free its slot."""
        assert entry.pins == 0, "a slot is freed during a copy"
        if entry.found:
            self.events.removed("host", entry.key)
        self._idle -= entry.safe
        del self._entries[entry.key]
        self._unsafe.pop(entry.key, None)
        self.slots.release(entry.slot)
        entry.slot = -1

    @property
    def spare(self) -> int:
        """Return the number of slots available now without losing a block: free ones, and unpinned safe entries."""
        return self.slots.free + self._idle

    def publish_to(self, events: BlockEvents) -> None:
        """Report every block that host memory has now to `events`, and every later change."""
        self.events = events
        for entry in self._entries.values():
            if entry.found:
                events.stored("host", entry.key)

    def unsafe(self) -> Iterator[Entry]:
        """Yield unsafe entries, least recently used first, including those being written to a tier below."""
        return iter(self._unsafe.values())

    def clear(self) -> None:
        """Forget all entries. Pinned ones keep their slot until they are unpinned."""
        for entry in list(self._entries.values()):
            if entry.pins == 0:
                self.drop(entry)
            else:
                if entry.found:
                    self.events.removed("host", entry.key)
                entry.forgotten = not entry.private

    def check(self) -> None:
        self.slots.check()
        taken = [entry.slot for entry in self._entries.values()]
        assert len(taken) == len(set(taken)), "two entries share a slot"
        assert self._idle == sum(entry.safe and entry.pins == 0 for entry in self._entries.values())
        for key, entry in self._unsafe.items():
            assert self._entries[key] is entry
            assert entry.ready
            assert not entry.safe

    def _rename_forgotten(self, entry: Entry) -> None:
        """Rename a forgotten entry, so that another entry can have its key."""
        places = [place for place in (self._entries, self._unsafe) if place.pop(entry.key, None) is not None]
        self._renamed += 1
        entry.key = b"forgotten" + self._renamed.to_bytes(8, "little")
        for place in places:
            place[entry.key] = entry

    def _evict_one(self, lossy: bool = True) -> bool:
        """Evict the least recently used safe entry; if there is none and `lossy` is true, the least recently used."""
        oldest = None
        for entry in self._entries.values() if lossy or len(self._unsafe) < len(self._entries) else ():
            if entry.pins or not entry.ready:
                continue
            if entry.safe:
                oldest = entry
                break
            oldest = (oldest or entry) if lossy else None
            if lossy and len(self._unsafe) == len(self._entries):
                break
        if oldest is None:
            return False
        self.evictions += 1
        self.dropped += not oldest.safe
        self.drop(oldest)
        return True
