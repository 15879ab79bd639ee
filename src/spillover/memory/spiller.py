"""Decides which device blocks are copied down and when, so that evicting a block seldom loses it and never waits.

Blocks that nobody holds are copied ahead of need, oldest first. Whoever needs room at once may take a block that was
not copied yet; whoever can wait is told to, for a moment.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from spillover.memory.blocks import EVICTABLE, FILLING, FREE, IN_FLIGHT, BlockPool
from spillover.memory.prefix_tree import PrefixTree
from spillover.memory.store import SpillStore

# How long a request that wants room waits for copies before blocks are lost instead: for half of it none, for the other
# half the oldest in host memory, then those it wants to overwrite.
PATIENCE_SECONDS = 0.1
AHEAD = 32  # blocks whose copies are begun at a time ahead of need: beginning them takes time between two steps


class Spiller:
    def __init__(self, pool: BlockPool, tree: PrefixTree, store: SpillStore, margin: int) -> None:
        """`margin`: blocks to be had at any time without a copy."""
        # Blocks that urgent requests may want at any moment. Others leave as many free: what is evictable may not be
        # had at once, since of a prefix the end goes first, and that may be in flight.
        self.reserve = 0
        self._pool = pool
        self._tree = tree
        self._store = store
        self._margin = margin
        self._dirty: OrderedDict[int, None] = OrderedDict()  # to be copied; idle ones in the order they became so
        self._idle: set[int] = set()  # held by nobody, in flight or not
        self._lost: set[int] = set()  # not worth a copy, or it failed: may go as they are
        self._copying: set[int] = set()
        self._impatient_at: float | None = None
        tree.listener = self

    # What the tree tells

    def on_cached(self, block: int) -> None:
        if self._store.eager:
            self._dirty[block] = None

    def on_idle(self, block: int) -> None:
        self._idle.add(block)
        if block not in self._lost:
            self._dirty[block] = None
            self._dirty.move_to_end(block)

    def on_busy(self, block: int) -> None:
        self._idle.discard(block)
        if not self._store.eager:
            self._dirty.pop(block, None)

    def on_gone(self, block: int) -> None:
        self._idle.discard(block)
        self._dirty.pop(block, None)
        self._lost.discard(block)

    # What the cache asks

    def poll(self) -> None:
        """Takes in copies that have ended, and starts those that will soon be wanted."""
        for block in self._store.spilled:
            if block in self._copying:
                self._copying.remove(block)
                self._tree.end_copy(block)
                if self._pool.state(block) is EVICTABLE:  # let go of while it was in flight
                    self._idle.add(block)
                if self._pool.cached(block) and not self._store.holds(self._tree.key(block)):
                    self._lost.add(block)  # it was tried
        self._store.spilled.clear()
        while self._pool.free < self.reserve and (victim := self._tree.victim()) is not None:
            if not all(self._clean(block) for block in self._tree.peers(victim)):
                break
            self._tree.evict()
        if self._store.eager:
            self._spill(len(self._dirty))
        elif self._dirty:
            clean = len(self._idle) - sum(1 for block in self._copying if block in self._idle) - len(self._dirty)
            short = self._margin - self._pool.free - max(0, clean) - len(self._copying)
            if short > 0:
                self._spill(min(short, max(4, len(self._idle) // 2), AHEAD))

    def make_room(self, blocks: int, urgent: bool) -> bool:
        """Frees blocks until that many are free. Urgent: also those that no tier has."""
        now = time.monotonic()
        impatient = urgent or (self._impatient_at is not None and now >= self._impatient_at)
        wanted = blocks if impatient else blocks + self.reserve
        while self._pool.free < wanted:
            victim = self._tree.victim()
            if victim is None:
                break
            lost = sum(not self._clean(block) for block in self._tree.peers(victim))
            if lost and not impatient:
                break
            self._store.dropped += lost
            self._tree.evict()
        if self._pool.free >= wanted:
            self._impatient_at = None
            return True
        if not impatient:
            if self._impatient_at is None:
                self._impatient_at = now + PATIENCE_SECONDS
            lossy = now >= self._impatient_at - PATIENCE_SECONDS / 2
            self._spill(wanted - self._pool.free - len(self._copying), lossy)
        return False

    def flush(self) -> bool:
        """Starts copying what nobody holds and no tier has; whether there was any."""
        before = len(self._copying)
        self._spill(len(self._dirty))
        return len(self._copying) > before

    def check(self) -> None:
        for block in self._copying:
            assert self._pool.state(block) is IN_FLIGHT
        for block in self._idle:
            assert self._pool.refs(block) == 0
            assert self._pool.cached(block)
        for block in self._dirty:
            assert self._pool.cached(block)
            assert self._pool.state(block) not in (FREE, FILLING)

    def _clean(self, block: int) -> bool:
        """Whether the block may leave the device as it is."""
        if block in self._lost or self._store.holds(self._tree.key(block)):
            self._dirty.pop(block, None)
            return True
        if block not in self._dirty:  # it was stored once, and the tiers have lost it since
            self._dirty[block] = None
        return False

    def _spill(self, count: int, lossy: bool = False) -> None:
        """Starts copies of the oldest blocks that want one."""
        items: list[tuple[bytes, int]] = []
        settled: list[int] = []
        for block in self._dirty:
            if len(items) >= count:
                break
            if self._pool.state(block) is IN_FLIGHT:
                continue
            key = self._tree.key(block)
            if self._store.holds(key):
                settled.append(block)
            elif not self._store.wanted(key):
                settled.append(block)
                self._lost.add(block)
            else:
                items.append((key, block))
        accepted = self._store.spill(items, lossy) if items else 0
        settled += [block for _, block in items[:accepted]]
        for block in settled:
            del self._dirty[block]
        for _, block in items[:accepted]:
            self._copying.add(block)
            self._tree.begin_copy(block)
