"""Moves the oldest blocks of a sequence that has outgrown the device to host memory, and lets it go on from there."""

from collections.abc import Callable, Iterable

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

    def __bool__(self) -> bool:
        """Whether blocks are on their way."""
        return bool(self._blocks)

    def start(self, sequence: SequenceBlocks, unit: int) -> bool:
        """As `KVCache.park`."""
        if sequence.parking:
            return True
        start = len(sequence.cold)
        blocks = sequence.tables[0][start : start + unit]
        if not self._store.keeps or start + unit > sequence.num_ready or sequence.failed_parks == MAX_PARKS:
            return False
        entries = self._store.park(blocks)
        if entries is None:
            return False
        self._empty_tree()
        for block in blocks:
            self._tree.begin_copy(block)
        self._blocks.update(blocks)
        sequence.parking = entries
        return True

    def take(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Takes in the ends of copies, once whoever spills has taken its own."""
        for block in self._store.spilled:
            self._blocks.remove(block)
            self._tree.end_copy(block)
        self._store.spilled.clear()
        for sequence in sequences:
            if sequence.parking:
                self._take(sequence)

    def _take(self, sequence: SequenceBlocks) -> None:
        start = len(sequence.cold)
        table = sequence.tables[0]
        end = start + len(sequence.parking)
        if any(block in self._blocks for block in table[start:end]):
            return
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
