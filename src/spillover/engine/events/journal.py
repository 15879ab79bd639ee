"""The journal of published KV events: recent batches by sequence number, and the resulting content of each tier.

Only the publisher's thread uses it. Sequence numbers begin at the start time, in 1/1024 ms, so that a restarted process
never continues the numbers of the process before it: every subscriber sees a restart as a gap.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from spillover.engine.events.log import Record, Removed, Stored
from spillover.memory.kv.event_wire import (
    MEDIA,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    block_hash,
)

BUFFER_BYTES = 64 << 20  # maximum total size of the batches kept for replay, in bytes
MOST_BLOCKS = 512  # maximum number of blocks per event
MOST_EVENTS = 256  # maximum number of events per message of a snapshot
KNOWN_BLOCKS = 1 << 18  # maximum number of blocks whose tokens are kept, for events of other tiers and snapshots


class Journal:
    def __init__(self, block_size: int, windows: Sequence[int | None], buffer_steps: int) -> None:
        self.sequence = (time.time_ns() // 10**6 << 10) - 1  # sequence number of the last batch
        self._block_size = block_size
        self._windows = tuple(windows)
        self._kept = buffer_steps
        self._batches: deque[bytes] = deque()  # the last batches, up to `sequence`
        self._bytes = 0
        self._held: dict[str, dict[tuple[bytes, int], None]] = {medium: {} for medium in MEDIA}  # oldest first
        self._holders: Counter[bytes] = Counter()  # number of (medium, group) pairs that hold the block, by digest
        self._known: OrderedDict[bytes, Stored] = OrderedDict()  # the device's records, with tokens, by digest
        self._encoder = msgspec.msgpack.Encoder()

    def append(self, records: Iterable[Record], cleared: bool = False) -> tuple[bytes, bytes]:
        """Apply records; return the batch to publish with its sequence number. `cleared`: first drop all blocks."""
        events: list[Event] = []
        if cleared:
            events.append(AllBlocksCleared())
            for held in self._held.values():
                held.clear()
            self._holders.clear()
            self._known.clear()
        events += self._events(self._apply(record) for record in records)
        batch = self._encoder.encode(EventBatch(time.time(), events, 0))
        self.sequence += 1
        self._batches.append(batch)
        self._bytes += len(batch)
        while len(self._batches) > self._kept or (self._bytes > BUFFER_BYTES and len(self._batches) > 1):
            self._bytes -= len(self._batches.popleft())
        return _packed(self.sequence), batch

    def replay(self, start: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield (number, batch) of the kept batches from this sequence number on. If older ones were requested, the
        first number shows that they are missing."""
        first = self.sequence - len(self._batches) + 1
        for number, batch in islice(enumerate(self._batches, first), max(0, start - first), None):
            yield _packed(number), batch

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all blocks that are held, in batches that replace the subscriber's state; each has the number of the
        last batch that the snapshot includes."""
        number, now = _packed(self.sequence), time.time()
        events: list[Event] = [AllBlocksCleared()]
        for medium, held in self._held.items():
            for event in self._events(self._full(Stored(medium, digest, group)) for digest, group in held):
                events.append(event)
                if len(events) == MOST_EVENTS:
                    yield number, self._encoder.encode(EventBatch(now, events, 0))
                    events = []
        if events:
            yield number, self._encoder.encode(EventBatch(now, events, 0))

    def _apply(self, record: Record) -> Record:
        """Update the holders of the record's block; return the record with the block's tokens, if they are known."""
        place, held = (record.digest, record.group), self._held[record.medium]
        if isinstance(record, Removed):
            del held[place]
            self._holders[record.digest] -= 1
            if not self._holders[record.digest]:
                del self._holders[record.digest]
                self._known.pop(record.digest, None)
            return record
        assert place not in held, "a block is told of twice"
        held[place] = None
        self._holders[record.digest] += 1
        if not record.tokens:
            return self._full(record)
        self._known[record.digest] = record
        if len(self._known) > KNOWN_BLOCKS:
            self._known.popitem(last=False)
        return record

    def _full(self, record: Stored) -> Stored:
        known = self._known.get(record.digest)
        return record if known is None else known._replace(medium=record.medium, group=record.group)

    def _events(self, records: Iterable[Record]) -> Iterator[Event]:
        """Yield one event for each run of records of the same kind whose blocks follow each other."""
        run: list[Record] = []
        for record in records:
            if run and (len(run) == MOST_BLOCKS or not _continues(run[-1], record)):
                yield self._event(run)
                run = []
            run.append(record)
        if run:
            yield self._event(run)

    def _event(self, run: Sequence[Record]) -> Event:
        first = run[0]
        hashes = [block_hash(record.digest) for record in run]
        group = first.group if len(self._windows) > 1 else None
        if isinstance(first, Removed):
            return BlockRemoved(hashes, first.medium, group)
        tokens, salted = array("i"), list[tuple[str, ...] | None]()
        for record in run:
            assert isinstance(record, Stored)
            tokens.frombytes(record.tokens)
            salted.append(None if record.salted is None else (record.salted,))
        event = BlockStored(hashes, None if first.parent is None else block_hash(first.parent), tokens.tolist(),
                            self._block_size, None, first.medium, None, salted if any(salted) else None, group)
        window = self._windows[first.group]
        if group is not None or window is not None:
            event.kv_cache_spec_kind = "full_attention" if window is None else "sliding_window"
            event.kv_cache_spec_sliding_window = window
        return event


def _continues(last: Record, record: Record) -> bool:
    """Return whether a record belongs to the same event as the previous record."""
    if type(last) is not type(record) or (last.medium, last.group) != (record.medium, record.group):
        return False
    if isinstance(last, Removed) or isinstance(record, Removed):
        return True
    return bool(last.tokens) == bool(record.tokens) and (not record.tokens or record.parent == last.digest)


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
