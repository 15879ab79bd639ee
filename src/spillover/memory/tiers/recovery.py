"""The recovery of a disk tier at start: the records of its own cache, and the bytes that other caches use.

It reads one table of headers per segment. Payloads are checked when they are loaded, except those of the last few
records, which are checked now: they may have been incompletely written when power was lost.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spillover.memory.tiers.folder import MAX_DESCRIPTION_BYTES, RECENCY_BYTES, CacheFolder, SegmentFile
from spillover.memory.tiers.record import EMPTY_HEADER, RecordHeader
from spillover.memory.tiers.seal import Seal
from spillover.memory.tiers.segment import PAGE, Segment, segment_size

CHECKED_RECORDS = 8
# The lock file, and the description twice, since its replacement exists together with the old one for a moment.
FIXED_BYTES = PAGE + 2 * MAX_DESCRIPTION_BYTES


def segment_cost(slots: int, payload_bytes: int) -> int:
    """Return the bytes that a segment adds to the folder, including its part of two recency files (old and new)."""
    return segment_size(slots, payload_bytes) + 2 * RECENCY_BYTES * slots


def slots_that_fit(room: int, payload_bytes: int) -> int:
    """Return the number of slots of the largest segment that fits in `room` bytes."""
    slots = max(0, room) // (segment_cost(2, payload_bytes) - segment_cost(1, payload_bytes))
    while slots > 0 and segment_cost(slots, payload_bytes) > room:
        slots -= 1
    return slots


@dataclass(frozen=True, slots=True)
class FoundRecord:
    segment: Segment
    index: int
    header: RecordHeader
    used: float


@dataclass(slots=True)
class Recovery:
    segments: list[Segment] = field(default_factory=list)
    records: list[FoundRecord] = field(default_factory=list)  # valid records, least recently used first
    unused: list[tuple[Segment, int, bool]] = field(default_factory=list)  # slots without a record; whether backed
    dropped: int = 0  # number of records that were damaged or incomplete
    next_sequence: int = 1
    next_number: int = 0  # number of the next segment
    others: list[tuple[CacheFolder, SegmentFile]] = field(default_factory=list)  # removable segments, oldest first
    others_bytes: int = 0  # bytes of other caches, and of segments that cannot be read or removed


def recover(root: Path, folder: CacheFolder, payload_bytes: int, capacity: int, seal: Seal) -> Recovery:
    """Read the contents of the folder; OSError only if the root itself cannot be listed."""
    found = Recovery()
    for cache in CacheFolder.all(root):
        if cache.identity != folder.identity:
            found.others_bytes += cache.small_bytes()
            for file in cache.segment_files():
                found.others.append((cache, file))
                found.others_bytes += file.nbytes
    _open_segments(found, folder, payload_bytes)
    _read_headers(found, payload_bytes, folder.recency(), seal)
    _drop_torn(found, payload_bytes, seal)
    _fit(found, payload_bytes, capacity)
    return found


def _open_segments(found: Recovery, folder: CacheFolder, payload_bytes: int) -> None:
    for file in folder.segment_files():
        if file.path.stem.isdigit():
            found.next_number = max(found.next_number, int(file.path.stem) + 1)
        try:
            segment = Segment.open(file.path, folder.identity)
            if segment is not None and segment.payload_bytes == payload_bytes:
                found.segments.append(segment)
            else:
                file.path.unlink()  # its creation was interrupted, or it has another format
        except OSError:
            found.others_bytes += file.nbytes


def _read_headers(found: Recovery, payload_bytes: int, recency: dict[int, float], seal: Seal) -> None:
    newest: dict[bytes, FoundRecord] = {}
    for segment in list(found.segments):
        try:
            raws = segment.raw_headers()
            size = segment.path.stat().st_size
        except OSError:
            found.segments.remove(segment)
            found.others_bytes += segment.nbytes
            continue
        for index, raw in enumerate(raws):
            header = RecordHeader.unpack(raw, segment.identity, seal)
            backed = segment.payload_offset(index) + payload_bytes <= size
            if header is None or header.payload_bytes != payload_bytes or not backed:
                found.dropped += raw != EMPTY_HEADER
                found.unused.append((segment, index, backed))
                continue
            found.next_sequence = max(found.next_sequence, header.sequence + 1)
            used = recency.get(header.sequence, header.written)
            record = FoundRecord(segment, index, header, used)
            # A block may be there twice: an eviction leaves its record on the disk, and it may be stored again later.
            known = newest.get(header.key)
            if known is not None and known.header.sequence >= header.sequence:
                record, known = known, record
            newest[header.key] = record
            if known is not None:
                found.unused.append((known.segment, known.index, True))
    found.records = sorted(newest.values(), key=lambda record: (record.used, record.header.sequence))


def _drop_torn(found: Recovery, payload_bytes: int, seal: Seal) -> None:
    payload = memoryview(bytearray(payload_bytes))
    for record in sorted(found.records, key=lambda record: -record.header.sequence)[:CHECKED_RECORDS]:
        try:
            record.segment.read(record.index, payload)
            whole = seal.of_payload(payload) == record.header.payload_seal
        except OSError:
            whole = False
        if not whole:
            found.records.remove(record)
            found.unused.append((record.segment, record.index, True))
            found.dropped += 1


def _fit(found: Recovery, payload_bytes: int, capacity: int) -> None:
    """Remove segments until the rest fits, with room for a block: those of other caches first, then its oldest."""

    def own_bytes() -> int:
        return FIXED_BYTES + sum(segment_cost(segment.slots, payload_bytes) for segment in found.segments)

    while found.others:
        room = capacity - own_bytes() - found.others_bytes
        if room >= 0 and (found.segments or slots_that_fit(room, payload_bytes)):
            break
        cache, file = found.others.pop(0)
        with suppress(OSError):
            file.path.unlink(missing_ok=True)
            found.others_bytes -= file.nbytes
            cache.tidy()
    last_use = dict.fromkeys(found.segments, 0.0)
    for record in found.records:
        last_use[record.segment] = record.used
    for segment in sorted(last_use, key=lambda segment: last_use[segment]):
        if own_bytes() + found.others_bytes <= capacity:
            break
        with suppress(OSError):
            segment.remove()
            found.segments.remove(segment)
            found.records = [record for record in found.records if record.segment is not segment]
            found.unused = [slot for slot in found.unused if slot[0] is not segment]
