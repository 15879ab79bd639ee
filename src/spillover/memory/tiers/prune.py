"""Making a disk tier's folder smaller, for `spill cache prune`. Refused while a server uses the folder.

The remaining records of a cache are moved to the front of its segments and the files are truncated, which frees disk
space. A move writes the record to its new slot before it erases the old one: if interrupted, both copies exist.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.memory.tiers.folder import DESCRIPTION, RECENCY_BYTES, TOKENS, CacheFolder, FolderLock
from spillover.memory.tiers.inspect import find_caches
from spillover.memory.tiers.record import EMPTY_HEADER, RecordHeader, is_keyed
from spillover.memory.tiers.seal import PLAIN
from spillover.memory.tiers.segment import Segment


@dataclass(frozen=True, slots=True)
class Pruned:
    blocks: int
    nbytes: int  # bytes freed on the disk


@dataclass(slots=True)
class _Record:
    place: int  # index of its slot, counted through all segments of the cache
    raw: bytes  # the header as it is stored
    header: RecordHeader
    used: float


@dataclass(slots=True)
class _Cache:
    folder: CacheFolder
    segments: list[Segment]
    places: list[tuple[Segment, int]] = field(default_factory=list)
    records: list[_Record] = field(default_factory=list)  # records to keep
    dropped: list[int] = field(default_factory=list)  # places of records to erase
    before: int = 0  # number of records before pruning

    def nbytes(self, count: int) -> int:
        """Return the bytes on the disk once only `count` records are left, in the first slots."""
        if count == 0:
            return 0
        total = RECENCY_BYTES * count + 8
        with suppress(OSError):
            total += (self.folder.path / DESCRIPTION).stat().st_size
        for segment in self.segments:
            here = min(count, segment.slots)
            count -= here
            if here == 0:
                break
            total += segment.end_of(here)
        return total


def prune(
    path: str | Path, *, size: int | None = None, older_than: float | None = None, identity: str | None = None
) -> Pruned:
    """Drop blocks not used for `older_than` seconds, then the least recently used until `size` bytes are left.

    With `identity` alone, that whole cache is dropped; with the other arguments, they apply to that cache only.
    """
    if size is None and older_than is None and identity is None:
        raise SpilloverError("nothing to prune: give a size to keep, an age, or the identity of a cache")
    root = Path(path)
    if not find_caches(root, identity):
        return Pruned(0, 0)  # without creating a lock file in a folder that is not a disk tier
    lock = FolderLock.acquire(root, "stop that one before pruning")
    if lock is None:
        raise SpilloverError(f"the disk cache at {root} cannot be written, so nothing can be pruned")
    try:
        caches = [_read(folder) for folder in find_caches(root, identity)]
        before = sum(cache.folder.nbytes() for cache in caches)
        _choose(caches, size, older_than, everything=size is None and older_than is None)
        for cache in caches:
            _apply(cache)
        after = sum(cache.folder.nbytes() for cache in caches)
        return Pruned(sum(cache.before - len(cache.records) for cache in caches), before - after)
    except OSError as error:
        raise SpilloverError(f"pruning {root} was interrupted; the remaining blocks are intact: {error}") from None
    finally:
        lock.release()


def _read(folder: CacheFolder) -> _Cache:
    segments = folder.segments(writable=True)
    # If one identity ever has payloads of two sizes, keep only one size, as the tier does.
    segments = [segment for segment in segments if segment.payload_bytes == segments[-1].payload_bytes]
    cache = _Cache(folder, segments)
    recency = folder.recency()
    newest: dict[bytes, _Record] = {}
    for segment in segments:
        for slot, raw in enumerate(segment.raw_headers()):
            place = len(cache.places)
            cache.places.append((segment, slot))
            header = RecordHeader.read(raw, segment.identity)
            if header is None or header.payload_bytes != segment.payload_bytes:
                if raw != EMPTY_HEADER:
                    cache.dropped.append(place)
                continue
            record = _Record(place, raw, header, recency.get(header.sequence, header.written))
            known = newest.get(header.key)
            if known is not None and known.header.sequence > header.sequence:
                record, known = known, record
            newest[header.key] = record
            if known is not None:
                cache.dropped.append(known.place)
    cache.records = sorted(newest.values(), key=lambda record: record.used)
    cache.before = len(cache.records)
    return cache


def _choose(caches: Sequence[_Cache], size: int | None, older_than: float | None, everything: bool) -> None:
    """Move the records to drop from each cache's `records` to its `dropped`."""
    oldest_first = sorted(
        ((record.used, i, record.place) for i, cache in enumerate(caches) for record in cache.records)
    )
    if everything:
        num_dropped = len(oldest_first)
    else:
        limit = time.time() - older_than if older_than is not None else 0.0
        num_dropped = sum(used < limit for used, _, _ in oldest_first)
        if size is not None:
            low, high = num_dropped, len(oldest_first)  # search for the smallest sufficient number of blocks
            while low < high:
                middle = (low + high) // 2
                left = [0] * len(caches)
                for _, i, _ in oldest_first[middle:]:
                    left[i] += 1
                if sum(cache.nbytes(count) for cache, count in zip(caches, left, strict=True)) <= size:
                    high = middle
                else:
                    low = middle + 1
            num_dropped = low
    for _, i, place in oldest_first[:num_dropped]:
        caches[i].dropped.append(place)
    for cache in caches:
        gone = set(cache.dropped)
        cache.records = [record for record in cache.records if record.place not in gone]


def _apply(cache: _Cache) -> None:
    for place in cache.dropped:
        segment, slot = cache.places[place]
        segment.erase([slot])
    _move_to_front(cache)
    end = max((record.place for record in cache.records), default=-1) + 1
    for segment in cache.segments:
        here = min(end, segment.slots)
        end -= here
        if here:
            segment.shorten(here)
        else:
            segment.remove()
        segment.close()
    if cache.dropped:  # the token log must not outlive the blocks of its requests
        (cache.folder.path / TOKENS).unlink(missing_ok=True)
    for file in cache.folder.segment_files():
        if file.path not in {segment.path for segment in cache.segments}:
            os.unlink(file.path)  # not a segment: its creation was interrupted
    if cache.records:
        cache.folder.write_recency((record.header.sequence, record.used) for record in cache.records)
    cache.folder.tidy()


def _move_to_front(cache: _Cache) -> None:
    """Move records to the front; one that turns out to be damaged is dropped, and leaves a gap."""
    taken = {record.place for record in cache.records}
    count = len(cache.records)
    free = iter([place for place in range(count) if place not in taken])
    kept = []
    for record in cache.records:
        segment, slot = cache.places[record.place]
        if record.place >= count:
            payload = memoryview(bytearray(segment.payload_bytes))
            segment.read(slot, payload)
            if not is_keyed(record.raw) and PLAIN.of_payload(payload) != record.header.payload_seal:
                segment.erase([slot])
                continue
            target, target_slot = cache.places[place := next(free)]
            target.write(target_slot, record.raw, payload)
            segment.erase([slot])
            record.place = place
        kept.append(record)
    cache.records = kept
