"""LRU: eviction of the least recently used block."""

import heapq
from collections.abc import Sequence


class LRU:
    """A policy that evicts the least recently used block. O(log n) per call, by a heap whose stale entries are skipped.

    A queue in order of insertion would not suffice: an interior block may be evicted only after its children, and its
    position in the order is then given by its last use, not by its insertion.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._last_use: dict[int, int] = {}
        self._candidates: set[int] = set()
        self._heap: list[tuple[int, int]] = []  # (last use, block); stale unless the block still has that last use

    def on_access(self, blocks: Sequence[int]) -> None:
        first = self._clock + 1
        self._clock += len(blocks)
        self._last_use.update(zip(blocks, range(first, self._clock + 1), strict=True))
        for block in self._candidates.intersection(blocks):
            self._push(block)

    def on_insert(self, block: int) -> None:
        self._candidates.add(block)
        self._push(block)

    def on_remove(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int | None:
        while self._heap:
            last_use, block = self._heap[0]
            if block in self._candidates and self._last_use.get(block, 0) == last_use:
                return block
            heapq.heappop(self._heap)
        return None

    def is_next_victim(self, block: int) -> bool:
        return self.victim() is None or (self._last_use.get(block, 0), block) < self._heap[0]

    def _push(self, block: int) -> None:
        heapq.heappush(self._heap, (self._last_use.get(block, 0), block))
        if len(self._heap) > 2 * len(self._candidates) + 64:
            self._heap = [(self._last_use.get(block, 0), block) for block in self._candidates]
            heapq.heapify(self._heap)
