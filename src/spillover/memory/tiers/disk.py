"""The disk tier: bounded, checksummed, with LRU eviction; blocks are found again after a restart.

The index is in memory and belongs to the owner's thread; workers only read and write. A slot leaves the index before it
is written, and its new record enters the index once the write has completed. If a disk is full, broken, read-only or
gone, stores and loads fail, without other effects.
"""

import errno
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.memory.kv.events import BlockEvents
from spillover.memory.policies import LRU, EvictionPolicy
from spillover.memory.tiers.base import CorruptRecordError, Lane, Ticket, TierStats
from spillover.memory.tiers.folder import CacheFolder, FolderLock, SegmentFile
from spillover.memory.tiers.health import Health, disk_error
from spillover.memory.tiers.record import RecordHeader
from spillover.memory.tiers.recovery import FIXED_BYTES, Recovery, recover, segment_cost, slots_that_fit
from spillover.memory.tiers.seal import PLAIN, Seal
from spillover.memory.tiers.segment import Segment, round_up
from spillover.memory.tiers.slots import SlotTable
from spillover.units import format_bytes

SEGMENT_BYTES = 128 << 20  # minimum size of a segment's payloads by default
MAX_SEGMENTS = 256  # approximate maximum number of segments, and so of open files
STORE_SECONDS = 10.0
LOAD_SECONDS = 5.0
REST_SECONDS = 30.0  # seconds for which a slot, or a full disk, is not used after a failure
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Store:
    key: bytes
    slot: int
    sequence: int
    record: RecordHeader | None = None  # header of the record; None until the worker has written it
    wanted: bool = True  # False if the block was forgotten by clear() during the write


@dataclass(slots=True)
class _Load:
    slot: int
    record: RecordHeader


@dataclass(slots=True)
class _Erasure:
    slots: list[int]


@dataclass(slots=True)
class _Removal:
    file: SegmentFile


class DiskTier:
    name = "disk"

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        payload_bytes: int,
        identity: bytes,
        description: Mapping[str, str],
        wake: Callable[[], None],
        *,
        store_seconds: float = STORE_SECONDS,
        load_seconds: float = LOAD_SECONDS,
        rest_seconds: float = REST_SECONDS,
        segment_bytes: int | None = None,
        threads: int = 2,
        policy: EvictionPolicy | None = None,
        seal: Seal = PLAIN,
    ) -> None:
        """Open the tier. `capacity_bytes` limits everything this package keeps under `path`, of all identities.

        `threads`: workers in each direction, so that a load never waits for stores.
        """
        self.path = Path(path)
        self.capacity_bytes = capacity_bytes
        self.payload_bytes = payload_bytes
        self.dropped = 0  # number of damaged or incomplete records found at the start
        needed = FIXED_BYTES + segment_cost(1, payload_bytes)
        if capacity_bytes < needed:
            raise SpilloverError(
                f"a disk cache of {format_bytes(capacity_bytes)} at {path} cannot hold one block; "
                f"give it at least {format_bytes(needed)} ({needed} bytes)"
            )
        if segment_bytes is None:
            segment_bytes = max(SEGMENT_BYTES, capacity_bytes // MAX_SEGMENTS)
        self._segment_slots = max(1, segment_bytes // round_up(payload_bytes))
        self._store_seconds, self._load_seconds, self._rest_seconds = store_seconds, load_seconds, rest_seconds
        self._seal = seal
        self._folder = CacheFolder.of(self.path, seal.identity(identity))
        self._health = Health(f"disk cache at {path}")
        self._table = SlotTable(policy if policy is not None else LRU())
        self._segments: list[Segment] = []
        self._others: list[tuple[CacheFolder, SegmentFile]] = []
        self._other_bytes = 0
        self._own_bytes = FIXED_BYTES
        self._sequence = self._segment_number = 0
        self._removing = False
        self._last_use = 0.0
        self._reading = Lane("disk-read", threads, wake)
        self._writing = Lane("disk-write", threads, wake)
        self._work: dict[Ticket[Any], _Store | _Load | _Erasure | _Removal] = {}
        self._storing: dict[bytes, Ticket[bool]] = {}
        self._stores = self._loads = self._store_failures = self._load_failures = 0
        self._seconds_writing = self._seconds_reading = 0.0
        self._lock: FolderLock | None = None
        self._open = self._start(description)

    # Tier methods

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        self.poll()
        usable = self._usable(self._reading)
        return Ticket.ended([usable and self._table.find(key) is not None for key in keys])

    def has(self, key: bytes) -> bool:
        return self._open and self._table.find(key) is not None

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self.poll()
        tickets: list[Ticket[bool]] = []
        touched: list[int] = []
        present: list[int] = []  # slots of blocks already stored, held so that the rest of the batch cannot evict them
        usable = self._usable(self._writing)
        deadline = time.monotonic() + self._store_seconds
        for key, payload in items:
            assert payload.nbytes == self.payload_bytes, f"a payload of {payload.nbytes} bytes"
            slot = self._table.find(key)
            if slot is not None:
                self._table.hold(slot)
                present.append(slot)
                touched.append(slot)
                tickets.append(Ticket.ended(True))
            elif key in self._storing:
                tickets.append(self._storing[key])
            elif usable and (slot := self._reserve()) is not None:
                touched.append(slot)
                tickets.append(self._write(key, payload, slot, deadline))
            else:
                self._store_failures += 1
                tickets.append(Ticket.ended(False))
        self._touch(touched)
        for slot in present:
            self._table.release(slot)
        return tickets

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self.poll()
        tickets: list[Ticket[bool]] = []
        touched: list[int] = []
        usable = self._usable(self._reading)
        deadline = time.monotonic() + self._load_seconds
        for key, buffer in items:
            assert buffer.nbytes == self.payload_bytes, f"a buffer of {buffer.nbytes} bytes"
            slot = self._table.find(key) if usable else None
            if slot is None:
                tickets.append(Ticket.ended(False))
            else:
                touched.append(slot)
                tickets.append(self._read(buffer, slot, deadline))
        self._touch(touched)
        return tickets

    def evict(self, count: int) -> Ticket[int]:
        """Free slots for other blocks; the files stay as large as they are."""
        self.poll()
        evicted = 0
        while evicted < count and self._table.evict():
            evicted += 1
        return Ticket.ended(evicted)

    def poll(self) -> None:
        for lane in (self._reading, self._writing):
            for ticket in lane.drain():
                work = self._work.pop(ticket)
                if isinstance(work, _Load):
                    self._end_load(work, ticket)
                elif isinstance(work, _Store):
                    self._end_store(work, ticket)
                elif isinstance(work, _Erasure):
                    self._end_erasure(work, ticket)
                else:
                    self._end_removal(work, ticket)

    def clear(self) -> None:
        self.poll()
        for ticket, work in list(self._work.items()):
            if isinstance(work, _Store):
                work.wanted = False
                ticket.cancel()
        self._storing.clear()
        dropped: dict[Segment, list[int]] = {segment: [] for segment in self._segments}
        for slot in list(self._table.live()):
            self._table.hold(slot)
            self._table.drop(slot)
            dropped[self._table[slot].segment].append(slot)
        # Erase free slots too: an evicted record is not in the index, but the next start would find it.
        for slot in self._table.take_free():
            dropped[self._table[slot].segment].append(slot)
        for segment, slots in dropped.items():
            self._submit_erasure(segment, slots, None)

    def stats(self) -> TierStats:
        self.poll()
        return TierStats(
            blocks=len(self._table),
            bytes=len(self._table) * self.payload_bytes,
            capacity_bytes=self.capacity_bytes,
            stores=self._stores,
            loads=self._loads,
            load_failures=self._load_failures,
            store_failures=self._store_failures,
            evictions=self._table.evictions,
            bytes_written=self._stores * self.payload_bytes,
            bytes_read=self._loads * self.payload_bytes,
            seconds_writing=self._seconds_writing,
            seconds_reading=self._seconds_reading,
            available=self._health.ok and self._usable(self._reading) and self._usable(self._writing),
        )

    def publish_to(self, events: BlockEvents) -> None:
        """Report every block that the tier holds now to `events`, and every later change."""
        self._table.publish_to(events)

    def close(self, deadline: float) -> None:
        if not self._open:
            return
        for ticket, work in list(self._work.items()):
            if isinstance(work, _Load):
                ticket.cancel()
        ended = self._writing.close(deadline)
        ended = self._reading.close(deadline) and ended
        self.poll()
        self._open = False
        if not ended:
            return  # a worker still hangs in a file access: files and lock stay open until the process ends
        try:
            slots = (self._table[slot] for slot in self._table.live())
            self._folder.write_recency([(s.record.sequence, s.used) for s in slots if s.record is not None])
            self._folder.touch()
        except OSError as error:
            self._health.failed(str(error))
        self._close_segments()

    def max_blocks(self) -> int:
        """Return the number of blocks that fit in the capacity once other caches have been removed."""
        blocks = sum(segment.slots for segment in self._segments)
        removable = sum(file.nbytes for _, file in self._others)
        room = self.capacity_bytes - self._own_bytes - (self._other_bytes - removable)
        while slots := min(self._segment_slots, slots_that_fit(room, self.payload_bytes)):
            blocks += slots
            room -= segment_cost(slots, self.payload_bytes)
        return blocks

    def damage(self, key: bytes, bit: int) -> bool:
        """Flip one bit of a stored payload, for tests of damage detection; False if there is no such block."""
        slot = self._table.find(key)
        if slot is None:
            return False
        self._table[slot].segment.flip_bit(self._table[slot].index, bit)
        return True

    def idle(self) -> bool:
        """Return whether no work is pending, including erasures."""
        self.poll()
        return not self._work

    def check(self) -> None:
        """Assert the invariants of the index."""
        self._table.check()
        assert self._own_bytes + self._other_bytes <= self.capacity_bytes or self._health.error is not None

    # Start

    def _start(self, description: Mapping[str, str]) -> bool:
        """Open the folder, and raise if it is unusable; later errors, or errors of stored blocks, are tolerated."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self._refused("it is a file, or inside a file") from None
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None
        self._lock = FolderLock.acquire(self.path)
        try:
            found = recover(self.path, self._folder, self.payload_bytes, self.capacity_bytes, self._seal)
            self._make_folder(description, found)
        except OSError as error:
            self._close_segments()
            raise self._refused(error.strerror or str(error)) from None
        except SpilloverError:
            self._close_segments()
            raise
        self._adopt(found)
        return True

    def _make_folder(self, description: Mapping[str, str], found: Recovery) -> None:
        try:
            self._folder.make()
            self._folder.describe(description)
        except OSError as error:
            if not found.records:
                raise
            self._health.failed(str(error))  # read-only or full: stored blocks can still be loaded
        needed, free = segment_cost(1, self.payload_bytes), shutil.disk_usage(self.path).free
        if free < needed and not found.segments and not found.others:
            raise self._refused(f"{format_bytes(free)} is free there, and one block takes {format_bytes(needed)}")

    def _refused(self, reason: str) -> SpilloverError:
        return SpilloverError(f"--disk {self.path} cannot be used: {reason}; give a folder that can be written")

    def _adopt(self, found: Recovery) -> None:
        self._segments = found.segments
        self._sequence, self._segment_number = found.next_sequence, found.next_number
        self._others, self._other_bytes = found.others, found.others_bytes
        self._own_bytes += sum(segment_cost(segment.slots, self.payload_bytes) for segment in found.segments)
        for record in found.records:
            self._table.adopt(record.segment, record.index, record.header, record.used)
            self._last_use = record.used
        for segment, index, backed in found.unused:
            self._table.add(segment, index, backed)
        self.dropped = found.dropped

    def _close_segments(self) -> None:
        for segment in self._segments:
            segment.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # Reading and writing

    def _usable(self, lane: Lane) -> bool:
        return self._open and not lane.stuck(time.monotonic())

    def _touch(self, slots: list[int]) -> None:
        """Note uses; a batch's first slot counts as the most recent: a prefix without its beginning is useless."""
        for slot in reversed(slots):
            # Times are distinct and increasing, so that the order is kept when they are written to a file.
            self._last_use = max(time.time(), self._last_use + 1e-6)
            self._table.touch(slot, self._last_use)

    def _write(self, key: bytes, payload: memoryview, slot: int, deadline: float) -> Ticket[bool]:
        store = _Store(key, slot, self._sequence)
        self._sequence += 1
        place = self._table[slot]
        segment, index = place.segment, place.index

        def write() -> bool:
            sealed = self._seal.of_payload(payload)
            header = RecordHeader(key, self.payload_bytes, sealed, store.sequence, time.time())
            segment.write(index, header.pack(segment.identity, self._seal), payload)
            store.record = header
            return True

        ticket = self._storing[key] = self._writing.submit(write, deadline)
        self._work[ticket] = store
        return ticket

    def _read(self, buffer: memoryview, slot: int, deadline: float) -> Ticket[bool]:
        place = self._table[slot]
        segment, index, record = place.segment, place.index, place.record
        assert record is not None

        def read() -> bool:
            segment.read(index, buffer)
            if self._seal.of_payload(buffer) != record.payload_seal:
                raise CorruptRecordError(f"{segment.path}, offset {segment.payload_offset(index)}: wrong checksum")
            return True

        self._table.hold(slot)
        ticket = self._reading.submit(read, deadline)
        self._work[ticket] = _Load(slot, record)
        return ticket

    def _end_store(self, store: _Store, ticket: Ticket[Any]) -> None:
        self._seconds_writing += ticket.seconds
        if self._storing.get(store.key) is ticket:
            del self._storing[store.key]
        if store.record is not None:
            self._stores += 1
            self._health.succeeded()
            if store.wanted and self._table.find(store.key) is None:
                self._table.publish(store.slot, store.record)
            else:
                place = self._table[store.slot]
                place.backed = True
                self._submit_erasure(place.segment, [store.slot], [place.index])
            return
        self._store_failures += store.wanted
        if (error := disk_error(ticket)) is not None:
            now = time.monotonic()
            self._health.failed(str(error))
            if error.errno in FULL or not self._table[store.slot].backed:
                self._table.fresh_from = now + self._rest_seconds
            self._table.rest(store.slot, now + self._rest_seconds)
        else:
            self._table.release(store.slot)

    def _end_load(self, load: _Load, ticket: Ticket[Any]) -> None:
        self._seconds_reading += ticket.seconds
        if ticket.result():
            self._loads += 1
            self._health.succeeded()
            self._table.release(load.slot)
            return
        still_there = self._table[load.slot].record is load.record
        if isinstance(ticket.error, CorruptRecordError):
            self._load_failures += 1
            if still_there:
                self._table.drop(load.slot)
                place = self._table[load.slot]
                self._submit_erasure(place.segment, [load.slot], [place.index])
            else:
                self._table.release(load.slot)
        elif (error := disk_error(ticket)) is not None:
            self._load_failures += 1
            self._health.failed(str(error))
            self._table.rest(load.slot, time.monotonic() + self._rest_seconds)
        else:
            self._load_failures += ticket.error is not None
            self._table.release(load.slot)

    # Free space

    def _reserve(self) -> int | None:
        now = time.monotonic()
        if not self._table.has_room():
            self._grow(now)
        return self._table.reserve(now)

    def _grow(self, now: float) -> None:
        """Add a segment if the capacity allows; if other caches use it, first remove their oldest segment."""
        room = self.capacity_bytes - self._own_bytes - self._other_bytes
        slots = min(self._segment_slots, slots_that_fit(room, self.payload_bytes))
        if slots < self._segment_slots and self._others:
            if not self._removing:
                self._remove_other()
            if len(self._table):
                return  # until it is removed, evict blocks of this cache
        if slots < 1 or now < self._table.fresh_from:
            return
        path = self._folder.segment_path(self._segment_number)
        segment = Segment(path, self._folder.identity, self.payload_bytes, slots)
        self._segment_number += 1
        self._segments.append(segment)
        self._own_bytes += segment_cost(slots, self.payload_bytes)
        for index in range(slots):
            self._table.add(segment, index, backed=False)

    def _remove_other(self) -> None:
        cache, file = self._others.pop(0)

        def remove() -> bool:
            file.path.unlink(missing_ok=True)
            cache.tidy()
            return True

        self._removing = True
        self._work[self._writing.submit(remove, time.monotonic() + self._store_seconds)] = _Removal(file)

    def _end_removal(self, removal: _Removal, ticket: Ticket[Any]) -> None:
        self._removing = False
        if ticket.result():
            self._other_bytes -= removal.file.nbytes

    def _submit_erasure(self, segment: Segment, slots: list[int], indices: list[int] | None) -> None:
        """Erase slots, which the caller holds; they are released once their records cannot be found again."""

        def erase() -> bool:
            try:
                segment.erase(indices)
            except OSError:
                segment.remove()  # this loses the whole file, including the records to erase
            return True

        self._work[self._writing.submit(erase, math.inf)] = _Erasure(slots)

    def _end_erasure(self, erasure: _Erasure, ticket: Ticket[Any]) -> None:
        if not ticket.result():
            self._health.failed(f"forgotten blocks may be found after a restart ({ticket.error or 'no time left'})")
        for slot in erasure.slots:
            self._table.release(slot)
