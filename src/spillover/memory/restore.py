"""Blocks that come back from other tiers: where a prompt's blocks are stored, and the loads of one sequence.

A sequence's table covers the blocks that are being loaded, as it covers those that are being computed. Any block whose
load fails is computed instead; any run of loaded blocks is skipped when the computing front reaches it. So a long
prefix can be computed from the front while it is loaded from the back, until the two meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from spillover.memory.digest import block_key, prefix_digests
from spillover.memory.loads import Load, LoadState, Search
from spillover.memory.store import SpillStore
from spillover.memory.windows import usable_blocks

TIERS = ("host", "disk", "remote")  # nearest first


class Restore:
    """The loads of one sequence, by block."""

    def __init__(self, first: int, end: int, windowed: bool, store: SpillStore,
                 end_copy: Callable[[int], None]) -> None:
        """`end_copy` is told of each device block that no load touches any more."""
        self.end = end  # the block after the last that is loaded
        self.skipped: dict[str, int] = {}  # blocks taken over so far, by tier
        self._first = first
        self._windowed = windowed
        self._store = store
        self._end_copy = end_copy
        self._loads: dict[int, list[tuple[Load, int]]] = {}  # block index -> loads and the device blocks they go to
        self._left = 0  # loads that have not ended
        self._failed = False
        self._deadline = 0.0

    def add(self, index: int, load: Load, block: int) -> None:
        self._loads.setdefault(index, []).append((load, block))
        load.on_end = self._on_end
        self._left += load.pending
        self._failed |= load.state is LoadState.FAILED
        self._deadline = max(self._deadline, load.deadline)

    def blocks(self) -> list[int]:
        """Those that loads go to; of loads that have failed at once, none."""
        return [block for load, block in self.pairs() if load.pending]

    def pairs(self) -> Iterator[tuple[Load, int]]:
        for pairs in self._loads.values():
            yield from pairs

    @property
    def pending(self) -> bool:
        return self._left > 0

    def broken(self, now: float) -> bool:
        """Whether the sequence had better start over: a copy does not end, or a window misses what it must see."""
        return (self._left > 0 and now > self._deadline) or (self._windowed and self._failed)

    def skip(self, index: int) -> int:
        """The first block from `index` on that is not loaded; what lies between is taken over, and counted."""
        if self._windowed and (self._left or self._failed):
            return index
        while index < self.end and (pairs := self._loads.get(index)):
            if any(load.state is not LoadState.DONE for load, _ in pairs):
                break
            tier = max((load.tier for load, _ in pairs), key=TIERS.index)
            self.skipped[tier] = self.skipped.get(tier, 0) + 1
            index += 1
        return index

    def limit(self, index: int) -> int | None:
        """The first block from `index` on that need not be computed, because it is loaded or may be soon."""
        for at in range(max(index, self._first), self.end):
            pairs = self._loads.get(at)
            if pairs and all(load.state is not LoadState.FAILED for load, _ in pairs):
                return at
        return None

    def drop(self) -> None:
        for load, _ in self.pairs():
            self._store.drop(load)

    def _on_end(self, load: Load) -> None:
        self._left -= 1
        self._failed |= load.state is LoadState.FAILED
        assert load.block is not None
        self._end_copy(load.block)


@dataclass(frozen=True)
class _Sought:
    """What is asked for a waiting sequence: the blocks from `start` on, which the device did not have."""

    start: int
    keys: list[list[bytes]]  # block -> group -> key; not all of them yet
    rest: Iterator[list[bytes]]  # the others, digested one by one as somebody wants to know
    search: Search  # for the keys that there were when it began

    def row(self, index: int) -> list[bytes] | None:
        """The keys of one block after `start`; None: the prompt has no such block."""
        while index >= len(self.keys):
            row = next(self.rest, None)
            if row is None:
                return None
            self.keys.append(row)
        return self.keys[index]


class Restorer:
    """Finds and starts restores. One search a waiting sequence, made when it is queued."""

    def __init__(self, store: SpillStore, block_size: int, windows: Sequence[int | None]) -> None:
        self._store = store
        self._block_size = block_size
        self._windows = tuple(windows)
        self._sought: dict[str, _Sought] = {}
        self._prefetches: dict[str, list[Load]] = {}

    def seek(self, seq: str, tokens: Sequence[int], start: int, digest: bytes) -> None:
        """Asks the tiers for the blocks of a prompt of which the device has the first `start`, the last of them with
        this digest, and brings those that lie far away nearer."""
        tail = tokens[start * self._block_size : len(tokens) - 1]  # one token is always left to compute
        groups = range(len(self._windows))
        rest = ([block_key(each, group) for group in groups] for each in prefix_digests(tail, self._block_size, digest))
        # Host memory answers at once whenever it is asked; the other tiers are asked for all before it matters.
        keys = list(rest) if self._store.tiers else []
        self._sought[seq] = _Sought(start, keys, rest, self._store.search([key for row in keys for key in row]))
        self._prefetch(seq)

    def covers(self, seq: str, have: int) -> bool:
        """Whether all after the first `have` blocks has been asked for."""
        return seq in self._sought and self._sought[seq].start <= have

    def ready(self, seq: str, now: float) -> bool:
        """Whether every tier has answered, or had its time to."""
        sought = self._sought.get(seq)
        return sought is None or sought.search.ready(now)

    def found(self, seq: str, have: int) -> list[str]:
        """The tiers of the blocks after the first `have`, as far as they can be restored."""
        sought = self._sought[seq]
        width = len(self._windows)
        rows: list[list[str | None]] = []
        for index in count(have - sought.start):
            keys = sought.row(index)
            if keys is None:
                break
            row = sought.search.sources[index * width : (index + 1) * width] or [None] * width
            if None in row:  # not asked for, or it has left the device since
                row = [tier or self._store.near(key) for tier, key in zip(row, keys, strict=True)]
            if not any(row):
                break
            rows.append(row)
        usable = usable_blocks(rows, self._windows, self._block_size, have)
        return [max((tier for tier in row if tier), key=TIERS.index) for row in rows[:usable]]

    def forget(self, seq: str) -> None:
        """The sequence is admitted, or no longer waits."""
        self._sought.pop(seq, None)
        for load in self._prefetches.pop(seq, ()):
            self._store.drop(load)

    def start(self, seq: str, tables: Sequence[list[int]], sources: Sequence[str], first: int,
              backwards: bool, end_copy: Callable[[int], None]) -> Restore:
        """The loads of blocks first .. first + len(sources), not sent yet."""
        end = first + len(sources)
        restore = Restore(first, end, any(window is not None for window in self._windows), self._store,
                          end_copy)
        order = range(end - 1, first - 1, -1) if backwards else range(first, end)
        wanted = [(index, group) for index in order for group, table in enumerate(tables) if table[index]]
        sought = self._sought[seq]
        loads = self._store.open([(sought.keys[index - sought.start][group], sources[index - first])
                                  for index, group in wanted])
        for (index, group), load in zip(wanted, loads, strict=True):
            restore.add(index, load, tables[group][index])
        return restore

    def send(self, restore: Restore) -> None:
        for load, block in restore.pairs():
            if load.pending:
                self._store.send(load, block)
        self._store.flush_copies()

    def _prefetch(self, seq: str) -> None:
        """Brings what is on disk or in a remote store to host memory while the request waits, within half of it."""
        if not self._store.keeps or not self._store.tiers:
            return
        sought = self._sought[seq]
        flat = (key for row in sought.keys for key in row)
        wanted = [(key, tier) for key, tier in zip(flat, sought.search.sources, strict=True)
                  if tier is not None and tier != "host"]
        room = self._store.prefetch_room - sum(len(loads) for loads in self._prefetches.values())
        if wanted and room > 0:
            self._prefetches[seq] = self._store.open(wanted[:room])
