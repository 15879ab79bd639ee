"""Decides which device blocks are spilled and when, so that evicting a block seldom loses it and never waits.

Blocks that no sequence holds are copied before their room is needed, oldest first. An urgent request for room may evict
a block that was not copied yet; any other request for room has to wait for copies, for a short time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from spillover.memory.kv.blocks import EVICTABLE, FILLING, FREE, IN_FLIGHT, BlockPool
from spillover.memory.kv.prefix_tree import PrefixTree
from spillover.memory.spill.host import Entry
from spillover.memory.spill.store import SpillStore

# How long a request for room waits for copies before blocks are lost. In the first half of this time none is lost, in
# the second half the oldest in host memory may be, and after it the device blocks that are to be overwritten.
LOSSY_AFTER_SECONDS = 0.1
AHEAD = 32  # maximum number of early copies to start at once: starting them takes time between two steps


class Spiller:
    def __init__(self, pool: BlockPool, tree: PrefixTree, store: SpillStore, margin: int) -> None:
        """Spill before room is needed. `margin`: number of blocks to keep available without waiting for a copy."""
        # Number of blocks that urgent requests may need at any time. Other requests leave this many free: an evictable
        # block may not be available at once, since a prefix is evicted from its end, which may be in flight.
        self.reserve = 0
        self._pool = pool
        self._tree = tree
        self._store = store
        self._margin = margin
        self._least = max(1, min(AHEAD, margin // 4))  # minimum number of early copies worth starting
        self._dirty: OrderedDict[int, None] = OrderedDict()  # blocks to copy; idle ones in the order they became idle
        self._idle: set[int] = set()  # blocks that no sequence holds, including those in flight
        self._unwanted: set[int] = set()  # blocks not worth a copy, which may be evicted without one
        self._failed: set[int] = set()  # blocks whose copy failed: may be evicted without one, until used again
        self._copying: set[int] = set()
        self._lossy_from: float | None = None  # when waiting requests for room may lose blocks; None: none waits
        tree.listeners.append(self)

    # Listener of the prefix tree

    def on_cached(self, blocks: Sequence[int]) -> None:
        if self._store.eager:
            self._dirty.update(dict.fromkeys(blocks))

    def on_idle(self, blocks: Sequence[int]) -> None:
        self._idle.update(blocks)
        self._failed.difference_update(blocks)
        self._store.note_use(self._tree.key(block) for block in blocks)
        for block in blocks:
            if block not in self._unwanted:
                self._dirty[block] = None
                self._dirty.move_to_end(block)

    def on_busy(self, blocks: Sequence[int]) -> None:
        self._idle.difference_update(blocks)
        if self._dirty and not self._store.eager:
            for block in blocks:
                self._dirty.pop(block, None)

    def on_gone(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._dirty.pop(block, None)
        for kept in (self._idle, self._unwanted, self._failed):
            kept.difference_update(blocks)

    # Evictor of the KV cache

    def poll(self) -> None:
        """Start copies that will soon be needed."""
        self._evict(self.reserve, lossy=False)
        if self._store.eager:
            self._spill(min(len(self._dirty), self._store.room))
        elif self._dirty:
            short = self._margin - self._ready()
            if short >= self._least:
                self._spill(min(short, max(4, len(self._idle) // 2), AHEAD))

    @property
    def waiting(self) -> bool:
        """Return whether any block to copy still waits for its copy to start."""
        return bool(self._dirty)

    @property
    def few_available(self) -> bool:
        """Return whether few blocks are available without starting another copy, counting those in flight."""
        return bool(self._dirty) and 4 * self._ready() < self._margin

    def ensure_free(self, blocks: int, urgent: bool) -> bool:
        """Evict until n blocks are free; return whether they are. `urgent`: also evict blocks that no tier has."""
        now = time.monotonic()
        lossy_allowed = urgent or (self._lossy_from is not None and now >= self._lossy_from)
        wanted = blocks if lossy_allowed else blocks + self.reserve
        if self._evict(wanted, lossy=False):
            self._reset_wait(urgent)
            return True
        self._store.process_spills()  # blocks copied by now can be evicted without loss or waiting
        if self._evict(wanted, lossy_allowed):
            self._reset_wait(urgent)
            return True
        if not lossy_allowed:
            if self._lossy_from is None:
                self._lossy_from = now + LOSSY_AFTER_SECONDS
            lossy = now >= self._lossy_from - LOSSY_AFTER_SECONDS / 2
            self._spill(wanted - self._pool.free - len(self._copying), lossy)
        return False

    def _reset_wait(self, urgent: bool) -> None:
        """Reset the waiting time for room, unless it was an urgent request that got room."""
        if not urgent:
            self._lossy_from = None

    def flush(self) -> bool:
        """Start copying all blocks that no tier has; return whether any copy was started."""
        before = len(self._copying)
        self._spill(len(self._dirty))
        return len(self._copying) > before

    def can_evict(self, blocks: Sequence[int]) -> bool:
        """Return whether these unreferenced blocks may leave the device without another copy; if not, start copies."""
        dirty = [block for block in blocks if not self._clean(block)]
        for block in reversed(dirty):
            self._dirty.move_to_end(block, last=False)
        if dirty:
            self._spill(len(dirty), lossy=True)
        return not dirty

    def check(self) -> None:
        for block in self._copying:
            assert self._pool.state(block) is IN_FLIGHT
        for block in self._idle:
            assert self._pool.refs(block) == 0
            assert self._pool.cached(block)
        for block in self._dirty:
            assert self._pool.cached(block)
            assert self._pool.state(block) not in (FREE, FILLING)

    def _ready(self) -> int:
        """Return the number of blocks available without starting another copy, now or once those in flight complete."""
        clean = len(self._idle) - len(self._idle & self._copying) - len(self._dirty)
        return self._pool.free + max(0, clean) + len(self._copying)

    def _evict(self, wanted: int, lossy: bool) -> bool:
        """Evict until n blocks are free; return whether they are. `lossy`: also evict blocks that no tier has."""
        clean = self._clean

        def can_evict(blocks: Sequence[int]) -> bool:
            lost = 0
            for block in blocks:
                lost += not clean(block)
            if lost and not lossy:
                return False
            self._store.dropped += lost
            return True

        return self._tree.evict(wanted, can_evict)

    def _clean(self, block: int) -> bool:
        """Return whether the block may leave the device without another copy."""
        if block in self._unwanted or block in self._failed or self._store.holds(self._tree.key(block)):
            self._dirty.pop(block, None)
            return True
        if block not in self._dirty:  # it was stored before, and the tiers have lost it since
            self._dirty[block] = None
        return False

    def _spill(self, count: int, lossy: bool = False) -> None:
        """Start copies of up to `count` blocks to copy, oldest first."""
        items: list[tuple[bytes, int]] = []
        settled: list[int] = []
        state, key_of, store = self._pool.state, self._tree.key, self._store
        for block in self._dirty:
            if len(items) >= count:
                break
            if state(block) is IN_FLIGHT:
                continue
            key = key_of(block)
            if store.holds(key):
                settled.append(block)
            elif store.lookup_pending(key):
                continue
            elif not store.wanted(key):
                settled.append(block)
                self._unwanted.add(block)
            else:
                items.append((key, block))
        accepted = [block for _, block in items[: store.spill(items, self._spilled, lossy)]] if items else []
        for block in settled:
            del self._dirty[block]
        for block in accepted:
            del self._dirty[block]
        self._tree.begin_copy(accepted)
        self._copying.update(accepted)

    def _spilled(self, blocks: Sequence[int], entries: Sequence[Entry]) -> None:
        """Process a completed copy. A block that host memory did not receive, or no longer has, counts as failed."""
        self._copying.difference_update(blocks)
        self._tree.end_copy(blocks)
        # Some may have been released by their sequence while in flight.
        self._idle.update(block for block in blocks if self._pool.state(block) is EVICTABLE)
        for block, entry in zip(blocks, entries, strict=True):
            if entry.slot < 0 and self._pool.cached(block) and not self._store.holds(self._tree.key(block)):
                self._failed.add(block)
