"""Inspecting a disk tier's folder, for `spill cache ls` and `verify`: read-only, also while a server uses it."""

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.memory.tiers.folder import CacheFolder
from spillover.memory.tiers.record import EMPTY_HEADER, RecordHeader, is_keyed
from spillover.memory.tiers.seal import PLAIN, Seal
from spillover.memory.tiers.segment import Segment

SETTLE_SECONDS = 0.05  # time after which a header that was being written is complete


@dataclass(frozen=True, slots=True)
class CacheInfo:
    identity: str  # identity in hexadecimal digits
    description: dict[str, str]  # model, dtype, block size, layout
    blocks: int
    nbytes: int  # bytes on the disk, including free slots
    last_use: float  # time of the last use in seconds since 1970


@dataclass(frozen=True, slots=True)
class BadRecord:
    file: Path
    offset: int  # offset of the damaged payload or header; 0 if the whole segment is bad
    key: bytes | None  # key of the record; None if the header or the segment cannot be read
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    checked: int  # number of records checked so far
    total: int
    nbytes: int  # bytes read so far
    bad: BadRecord | None  # the record just checked or an unreadable segment; None if the record is good


def list_caches(path: str | Path) -> list[CacheInfo]:
    """Return the caches under this folder, last used first."""
    found = []
    for cache in reversed(find_caches(path)):
        blocks = 0
        for segment in cache.segments():
            with suppress(OSError):
                blocks += sum(RecordHeader.read(raw, segment.identity) is not None for raw in segment.raw_headers())
            segment.close()
        found.append(CacheInfo(cache.identity.hex(), cache.description(), blocks, cache.nbytes(), cache.last_use()))
    return found


def verify(path: str | Path, identity: str | None = None, seal: Seal = PLAIN) -> Iterator[VerifyProgress]:
    """Read every record and compare its checksums, or its MACs by the key of `seal`. `identity` may be a prefix of an
    identity, if it is unique."""
    found: list[tuple[Segment, int, bytes]] = []
    unreadable: list[BadRecord] = []
    for cache in find_caches(path, identity):
        for file in sorted(file.path for file in cache.segment_files()):
            try:
                segment = _open(file, cache.identity)
                if segment is None:
                    reason = "the segment's first page is damaged; none of its records can be found"
                    unreadable.append(BadRecord(file, 0, None, reason))
                    continue
                with closing(segment):
                    raws = enumerate(segment.raw_headers())
                    found.extend((segment, slot, raw) for slot, raw in raws if raw != EMPTY_HEADER)
            except FileNotFoundError:  # a server has just removed the segment
                pass
            except OSError as error:
                reason = f"the segment cannot be read ({error.strerror or error})"
                unreadable.append(BadRecord(file, 0, None, reason))
    if seal is PLAIN and any(is_keyed(raw) for _, _, raw in found):
        raise SpilloverError(f"{path} has blocks that were written with a key; give it by --kv-store-key-file, or "
                             "choose another cache by --identity")
    return _verify(found, unreadable, seal)


def _open(file: Path, identity: bytes) -> Segment | None:
    segment = Segment.open(file, identity, writable=False)
    if segment is None:  # a server may be creating it
        time.sleep(SETTLE_SECONDS)
        segment = Segment.open(file, identity, writable=False)
    return segment


def _verify(found: list[tuple[Segment, int, bytes]], unreadable: list[BadRecord],
            seal: Seal) -> Iterator[VerifyProgress]:
    for segment_file in unreadable:
        yield VerifyProgress(0, len(found), 0, segment_file)
    nbytes = 0
    current: Segment | None = None
    for checked, (segment, slot, raw) in enumerate(found, start=1):
        if current is not segment:
            if current is not None:
                current.close()
            current = segment
        bad = None
        with suppress(FileNotFoundError):  # a server has just removed the segment
            bad = _check(segment, slot, raw, seal if is_keyed(raw) else PLAIN)
            nbytes += segment.payload_bytes
        yield VerifyProgress(checked, len(found), nbytes, bad)
    if current is not None:
        current.close()


def _check(segment: Segment, slot: int, raw: bytes, seal: Seal) -> BadRecord | None:
    """Check a record. A server may rewrite the slot, but zeroes its header first: same header means same payload."""
    header = RecordHeader.unpack(raw, segment.identity, seal)
    if header is None:
        time.sleep(SETTLE_SECONDS)
        if segment.raw_header(slot) != raw:
            return None
        return BadRecord(segment.path, segment.header_offset(slot), None, "the header is damaged")
    offset = segment.payload_offset(slot)
    if header.payload_bytes != segment.payload_bytes:
        return BadRecord(segment.path, segment.header_offset(slot), header.key, "the length is wrong")
    payload = memoryview(bytearray(segment.payload_bytes))
    try:
        segment.read(slot, payload)
        if seal.of_payload(payload) == header.payload_seal:
            return None
        reason = "the checksum of the payload is wrong"
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = str(error)
    return BadRecord(segment.path, offset, header.key, reason) if segment.raw_header(slot) == raw else None


def find_caches(path: str | Path, identity: str | None = None) -> list[CacheFolder]:
    """Find all caches, or the one whose identity begins with `identity`; least recently used first."""
    root = Path(path)
    try:
        caches = CacheFolder.all(root)
    except OSError as error:
        raise SpilloverError(f"there is no disk cache at {root}: {error.strerror or error}") from None
    if identity is None:
        return caches
    chosen = [cache for cache in caches if cache.identity.hex().startswith(identity.lower())]
    if len(chosen) != 1:
        names = ", ".join(sorted(cache.identity.hex()[:12] for cache in chosen or caches)) or "none at all"
        problem = "more than one cache begins" if chosen else "no cache begins"
        raise SpilloverError(f"{root}: {problem} with '{identity}'; there are {names}")
    return chosen
