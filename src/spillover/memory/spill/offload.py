"""Moves the oldest blocks of a sequence that has outgrown the device to host memory, so that it can continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.spill.host import Entry
from spillover.memory.spill.store import SpillStore

MAX_FAILURES = 3  # maximum number of failed moves of one sequence


@dataclass(slots=True)
class _Offloaded:
    """The blocks of one sequence that are in host memory or being moved there."""

    entries: list[Entry] = field(default_factory=list)  # the sequence's leading blocks
    slots: tuple[int, ...] = ()  # slots of these blocks in host memory
    moving: list[Entry] = field(default_factory=list)  # the next blocks, which are being moved
    copies: int = 0  # number of blocks in `moving` whose copy has not completed
    failures: int = 0


class Offload:
    def __init__(self, kv: KVCache, store: SpillStore) -> None:
        self._kv = kv
        self._store = store
        self._sequences: dict[str, _Offloaded] = {}

    @property
    def moving(self) -> bool:
        """Return whether blocks are being moved."""
        return any(sequence.moving for sequence in self._sequences.values())

    def slots(self, seq: str) -> tuple[int, ...]:
        return self._sequences[seq].slots if seq in self._sequences else ()

    def start(self, seq: str, num_blocks: int) -> bool:
        """Offload as documented at `KVConnector.offload`; only if every layer has full attention."""
        if not self._store.keeps or self._kv.windows != (None,):
            return False
        sequence = self._sequences.setdefault(seq, _Offloaded())
        if sequence.moving:
            return True
        start = len(sequence.entries)
        if start + num_blocks > self._kv.num_ready(seq) or sequence.failures == MAX_FAILURES:
            return False
        blocks = self._kv.table(seq)[start : start + num_blocks]
        entries = self._store.private.offload(blocks, partial(self._copied, sequence))
        if entries is None:
            return False
        self._kv.reset_prefix_cache()
        self._kv.begin_copy(blocks)
        sequence.moving, sequence.copies = entries, len(entries)
        return True

    def poll(self) -> None:
        """Remove moved blocks from their sequence's table; doing this in poll() means never while a step is planned."""
        for seq, sequence in self._sequences.items():
            if sequence.moving and not sequence.copies:
                self._finish_move(seq, sequence)

    def release(self, seq: str) -> None:
        """Release the slots of a sequence that is being released."""
        if seq in self._sequences:
            sequence = self._sequences.pop(seq)
            self._store.private.release(sequence.entries + sequence.moving)

    def _copied(self, sequence: _Offloaded, blocks: Sequence[int], _entries: Sequence[Entry]) -> None:
        sequence.copies -= len(blocks)
        self._kv.end_copy(blocks)

    def _finish_move(self, seq: str, sequence: _Offloaded) -> None:
        moved, sequence.moving = sequence.moving, []
        if all(entry.ready for entry in moved):
            sequence.entries += moved
            sequence.slots += tuple(entry.slot for entry in moved)
            self._kv.drop_offloaded(seq, len(sequence.entries))
        else:
            sequence.failures += 1
            self._store.private.release(moved)
