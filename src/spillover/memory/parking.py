"""Moves the oldest blocks of a sequence that has outgrown the device to host memory, and lets it go on from there."""

from collections.abc import Callable

from spillover.memory.host import Entry
from spillover.memory.prefix_tree import PrefixTree
from spillover.memory.sequence import SequenceBlocks
from spillover.memory.store import SpillStore

MAX_PARKS = 3  # failed attempts for one sequence


class Parking:
    def __init__(self, tree: PrefixTree, store: SpillStore, empty_tree: Callable[[], None]) -> None:
        self._tree = tree
        self._store = store
        self._empty_tree = empty_tree
        self._blocks: set[int] = set()  # on their way
        self._moving: list[SequenceBlocks] = []  # whose blocks are on their way

    def __bool__(self) -> bool:
        """Whether blocks are on their way."""
        return bool(self._moving)

    def start(self, sequence: SequenceBlocks, unit: int) -> bool:
        """As `KVCache.park`."""
        if sequence.parking:
            return True
        start = len(sequence.cold)
        blocks = sequence.tables[0][start : start + unit]
        if not self._store.keeps or start + unit > sequence.num_ready or sequence.failed_parks == MAX_PARKS:
            return False
        entries = self._store.park(blocks, self._copied)
        if entries is None:
            return False
        self._empty_tree()
        for block in blocks:
            self._tree.begin_copy(block)
        self._blocks.update(blocks)
        sequence.parking = entries
        self._moving.append(sequence)
        return True

    def poll(self) -> None:
        """Takes blocks that have arrived out of their sequence's table: here, and so never while a step is planned."""
        self._moving = [sequence for sequence in self._moving if not self._take(sequence)]

    def release(self, sequence: SequenceBlocks) -> None:
        """Gives up the slots of a sequence that has ended."""
        for entry in sequence.cold + sequence.parking:
            self._store.unpark(entry)
        if sequence.parking:
            self._moving.remove(sequence)

    def _copied(self, block: int, _entry: Entry) -> None:
        self._blocks.remove(block)
        self._tree.end_copy(block)

    def _take(self, sequence: SequenceBlocks) -> bool:
        """Whether the sequence's copies have ended; then they are taken in."""
        start = len(sequence.cold)
        table = sequence.tables[0]
        end = start + len(sequence.parking)
        if any(block in self._blocks for block in table[start:end]):
            return False
        if all(entry.ready for entry in sequence.parking):
            sequence.cold += sequence.parking
            sequence.cold_addresses += tuple(self._store.address(entry) for entry in sequence.parking)
            for i in range(start, end):
                self._tree.unref(table[i])
                table[i] = 0
            sequence.first[0] = end
        else:
            sequence.failed_parks += 1
            for entry in sequence.parking:
                self._store.unpark(entry)
        sequence.parking = []
        return True
