"""The map from records to slots of a disk tier, and the choice of the slot for the next record. It does no I/O.

A slot is *free*, *written to* (reserved), *live* (its record can be found), or *dropped* (no longer found, but a load
still reads it or its header is still to be erased). Only a live slot that is not being read may be the policy's victim.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from spillover.memory.kv.events import NO_BLOCK_EVENTS, BlockEvents
from spillover.memory.policies import EvictionPolicy
from spillover.memory.tiers.record import RecordHeader
from spillover.memory.tiers.segment import Segment


@dataclass(slots=True)
class Slot:
    segment: Segment
    index: int  # index of the slot in its segment
    backed: bool  # whether it has been written before, so that another write needs no more disk space
    record: RecordHeader | None = None
    used: float = 0.0  # time of the last use in seconds since 1970
    holds: int = 0  # number of loads that read it, or 1 for a pending write or erasure


class SlotTable:
    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._slots: list[Slot] = []
        self._live: dict[bytes, int] = {}
        self._free: list[int] = []  # free slots that are backed
        self._fresh: deque[int] = deque()  # free slots that are not backed
        self._resting: deque[tuple[float, int]] = deque()  # slots whose I/O failed: (time of the next try, slot)
        self.fresh_from = 0.0  # no slot of `_fresh` is used before this time, because the disk was full
        self.evictions = 0
        self.events: BlockEvents = NO_BLOCK_EVENTS

    def __len__(self) -> int:
        """Return the number of live records."""
        return len(self._live)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def live(self) -> Iterator[int]:
        yield from self._live.values()

    def publish_to(self, events: BlockEvents) -> None:
        self.events = events
        for key in self._live:
            events.stored("disk", key)

    def find(self, key: bytes) -> int | None:
        return self._live.get(key)

    def add(self, segment: Segment, index: int, backed: bool) -> int:
        """Add a free slot and return its number."""
        slot = len(self._slots)
        self._slots.append(Slot(segment, index, backed))
        (self._free if backed else self._fresh).append(slot)
        return slot

    def adopt(self, segment: Segment, index: int, record: RecordHeader, used: float) -> None:
        """Add a slot with the record that recovery found in it; called in order of use."""
        slot = len(self._slots)
        self._slots.append(Slot(segment, index, True, holds=1))
        self.touch(slot, used)
        self.publish(slot, record)

    def touch(self, slot: int, now: float) -> None:
        self._slots[slot].used = now
        self._policy.on_access((slot,))

    def hold(self, slot: int) -> None:
        """Hold a slot: it is not reused until release()."""
        found = self._slots[slot]
        found.holds += 1
        if found.record is not None and found.holds == 1:
            self._policy.on_remove(slot)

    def release(self, slot: int) -> None:
        found = self._slots[slot]
        assert found.holds > 0, f"slot {slot} is not held"
        found.holds -= 1
        if found.holds == 0:
            if found.record is not None:
                self._policy.on_insert(slot)
            else:
                (self._free if found.backed else self._fresh).append(slot)

    def reserve(self, now: float) -> int | None:
        """Return a slot to write to, held; evict the policy's victim if none is free. None if no slot is available."""
        while self._resting and self._resting[0][0] <= now:
            slot = self._resting.popleft()[1]
            (self._free if self._slots[slot].backed else self._fresh).append(slot)
        if not self._free and not (self._fresh and now >= self.fresh_from):
            self.evict()
        if self._free:
            slot = self._free.pop()
        elif self._fresh and now >= self.fresh_from:
            slot = self._fresh.popleft()
        else:
            return None
        self._slots[slot].holds = 1
        return slot

    def take_free(self) -> list[int]:
        """Hold and return every slot that has no record and is not held."""
        taken = [*self._free, *self._fresh, *(slot for _, slot in self._resting)]
        self._free.clear()
        self._fresh.clear()
        self._resting.clear()
        for slot in taken:
            self._slots[slot].holds = 1
        return taken

    def has_room(self) -> bool:
        """Return whether a slot is free, even if it must not be tried yet."""
        return bool(self._free or self._fresh)

    def publish(self, slot: int, record: RecordHeader) -> None:
        """Make the slot live and release the writer's hold."""
        found = self._slots[slot]
        assert found.record is None
        assert record.key not in self._live
        found.record = record
        found.backed = True
        self._live[record.key] = slot
        self.events.stored("disk", record.key)
        self.release(slot)

    def drop(self, slot: int) -> None:
        """Drop the record, which is no longer found."""
        found = self._slots[slot]
        assert found.record is not None
        if found.holds == 0:
            self._policy.on_remove(slot)
        del self._live[found.record.key]
        self.events.removed("disk", found.record.key)
        found.record = None
        found.holds += 1
        self.release(slot)

    def rest(self, slot: int, until: float) -> None:
        """Release a slot after an I/O error, but do not use it again before this time."""
        found = self._slots[slot]
        if found.record is not None:
            self.drop(slot)
        found.holds -= 1
        if found.holds == 0:
            self._resting.append((until, slot))

    def evict(self) -> bool:
        victim = self._policy.victim()
        if victim is None:
            return False
        self.drop(victim)
        self.evictions += 1
        return True

    def check(self) -> None:
        """Assert that every slot is in exactly one state and that all counts agree."""
        places = [*self._free, *self._fresh, *(slot for _, slot in self._resting), *self._live.values()]
        assert len(places) == len(set(places)), "a slot is in two places"
        for number, slot in enumerate(self._slots):
            assert slot.holds >= 0
            where = f"slot {number}: {slot}"
            if number in places:
                assert slot.holds == 0 or slot.record is not None, where
            else:
                assert slot.holds > 0, f"lost {where}"
            assert (slot.record is not None) == (number in self._live.values()), where
        for key, number in self._live.items():
            record = self._slots[number].record
            assert record is not None
            assert record.key == key
