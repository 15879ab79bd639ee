"""The host tier's memory: slots of one block each, and which stored block lies in which.

A slot is written by one copy at a time and read by any number; `pins` counts those who rely on it. Everything here is
called on the engine's thread; copies themselves run elsewhere on the memory that `view` names.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from spillover.kernels.huge_pages import address_of
from spillover.memory.kv.events import NO_BLOCK_EVENTS, BlockEvents
from spillover.memory.transfer.link import SlotViews

# Host memory is taken from the system in at most this many slabs, of at least this size each. Pinning a slab holds
# up the device's driver, 0.2 ms a megabyte: a small one is hidden by the step that runs meanwhile.
MAX_SLABS = 8192
SLAB_BYTES = 8 << 20


class Slots:
    """Equal pieces of host memory, taken a slab at a time as they are first needed and kept until the end."""

    def __init__(self, allocate: Callable[[int], memoryview], slot_bytes: int, limit: int) -> None:
        self.limit = limit
        self.slot_bytes = slot_bytes
        self._allocate = allocate
        self._stride = -(-slot_bytes // 4096) * 4096  # so that a disk can read into it directly
        self._per_slab = max(1, max(SLAB_BYTES, limit * self._stride // MAX_SLABS) // self._stride)
        self._slabs: list[memoryview] = []  # the last may be shorter; no object a slot, for the collector to look at
        self._addresses: npt.NDArray[np.int64] = np.empty(limit, dtype=np.int64)  # of slots, as far as there are any
        self._count = 0  # number of slots
        self._free: list[int] = []

    @property
    def free(self) -> int:
        """Return the slots that take() can give."""
        return len(self._free) + self.limit - self._count

    @property
    def used(self) -> int:
        return self._count - len(self._free)

    def take(self) -> int | None:
        if not self._free and self._count < self.limit:
            self._grow()
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        slab, place = divmod(slot, self._per_slab)
        return self._slabs[slab][place * self._stride : place * self._stride + self.slot_bytes]

    def address(self, slot: int) -> int:
        return int(self._addresses[slot])

    def views(self, slots: list[int]) -> SlotViews:
        return SlotViews(self.view, slots, self._addresses[slots], self.slot_bytes)

    def _grow(self) -> None:
        first = self._count
        count = min(self._per_slab, self.limit - first)
        try:
            slab = self._allocate(count * self._stride)
        except (MemoryError, OSError, RuntimeError):  # RuntimeError: pinned memory that the driver refuses
            self.limit = first  # what there is must do
            return
        self._slabs.append(slab)
        self._count += count
        self._addresses[first : self._count] = address_of(slab) + np.arange(count) * self._stride
        self._free.extend(reversed(range(first, self._count)))

    def check(self) -> None:
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert self.used + self.free == self.limit


class Entry:
    """A stored block in a slot: arriving, or ready to be read."""

    __slots__ = ("forgotten", "key", "pins", "private", "ready", "safe", "slot", "writes")

    def __init__(self, key: bytes, slot: int) -> None:
        self.key = key
        self.slot = slot  # -1 once it is dropped
        self.ready = False
        self.private = False  # belongs to one live sequence, found by nobody else
        self.forgotten = False  # found by nobody any more, and dropped when nobody relies on it
        self.pins = 0  # copies and restores that rely on the slot
        self.safe = False  # losing it loses nothing: the tiers below have it, or there are none
        self.writes = 0  # pins of writes to a tier below

    @property
    def found(self) -> bool:
        """Return whether a search finds it."""
        return self.ready and not self.private and not self.forgotten


class HostCache:
    """Entries by key, least recently used first. Never holds more than the slots do."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.evictions = 0
        self.dropped = 0  # evicted blocks that no tier had
        self._idle = 0  # entries that are safe, and that nobody relies on
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._unsafe: OrderedDict[bytes, Entry] = OrderedDict()  # ready, and nowhere below; same order
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
        """Return the entry, which is now the one used last."""
        entry = self._entries.get(key)
        if entry is None or entry.forgotten:
            return None
        self._entries.move_to_end(key)
        if self._unsafe and key in self._unsafe:
            self._unsafe.move_to_end(key)
        return entry

    def reserve(self, key: bytes, lossy: bool = True) -> Entry | None:
        """Return a new entry, arriving and pinned once by whoever fills it; None if every slot is in use. `lossy`: may
        evict a block that no tier below has."""
        assert self.get(key) is None, "the block is here or on its way already"
        slot = self.slots.take()
        if slot is None and self._make_room(lossy):
            slot = self.slots.take()
        if slot is None:
            return None
        if key in self._entries:
            self._make_way(self._entries[key])
        entry = self._entries[key] = Entry(key, slot)
        entry.pins = 1
        return entry

    def arrive(self, entry: Entry, safe: bool) -> None:
        """Note that the entry's bytes are there; whoever brought them still holds it."""
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
        """Mark an entry that the tiers below have lost."""
        assert entry.ready
        self._idle -= entry.pins == 0 and entry.safe
        entry.safe = False
        self._unsafe[entry.key] = entry

    def pin(self, entry: Entry) -> None:
        """Pin the slot, which somebody relies on until unpin."""
        self._idle -= entry.pins == 0 and entry.safe
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        self._idle += entry.pins == 0 and entry.safe

    def drop(self, entry: Entry) -> None:
        """Forget an entry that nobody relies on."""
        assert entry.pins == 0, "a slot is freed under a copy"
        if entry.found:
            self.events.removed("host", entry.key)
        self._idle -= entry.safe
        del self._entries[entry.key]
        self._unsafe.pop(entry.key, None)
        self.slots.give_back(entry.slot)
        entry.slot = -1

    @property
    def spare(self) -> int:
        """Return the slots that can be had now without losing a block: free, or safe in a tier below."""
        return self.slots.free + self._idle

    def tell(self, events: BlockEvents) -> None:
        """Tell of every block that is here now, and from now on of each that comes or goes."""
        self.events = events
        for entry in self._entries.values():
            if entry.found:
                events.stored("host", entry.key)

    def unsafe(self) -> Iterator[Entry]:
        """Yield unsafe entries, least recently used first; those that are being written are among them."""
        return iter(self._unsafe.values())

    def clear(self) -> None:
        """Forget all that is here. What somebody relies on stays until nobody does."""
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

    def _make_way(self, entry: Entry) -> None:
        """Take a forgotten entry's name from it for another."""
        places = [place for place in (self._entries, self._unsafe) if place.pop(entry.key, None) is not None]
        self._renamed += 1
        entry.key = b"forgotten" + self._renamed.to_bytes(8, "little")
        for place in places:
            place[entry.key] = entry

    def _make_room(self, lossy: bool = True) -> bool:
        """Evict the oldest entry that is safe, or if there is none the oldest at all."""
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
