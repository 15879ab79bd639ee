"""Blocks that come back from other tiers: where a prompt's blocks are stored, and the loads of one sequence.

A sequence's table covers the blocks that are being loaded, as it covers those that are being computed. Any block whose
load fails is computed instead; any run of loaded blocks is skipped when the computing front reaches it. So a long
prefix can be computed from the front while it is loaded from the back, until the two meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from spillover.memory.kv.digest import block_key, prefix_digests
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.kv.windows import usable_blocks
from spillover.memory.spill.loads import Load, LoadState, Search
from spillover.memory.spill.store import SpillStore

TIERS = ("host", "disk", "remote")  # nearest first


class StoredBlock(NamedTuple):
    """A block of a prompt that can be loaded."""

    tier: str  # the farthest that one of its layer groups lies in
    keys: list[bytes]  # one a group


class Restore:
    """The loads of one sequence, by block."""

    def __init__(self, kv: KVCache, store: SpillStore, seq: str, first: int, stored: Sequence[StoredBlock],
                 backwards: bool) -> None:
        """Start loading the sequence's blocks from `first` on, which its tables cover."""
        self.end = first + len(stored)  # the block after the last that is loaded
        self._kv = kv
        self._store = store
        self._first = first
        self._windowed = any(window is not None for window in kv.windows)
        self._loads: dict[int, list[Load]] = {}  # by block index
        self._left = 0  # loads that have not ended
        self._failed = False
        self._deadline = 0.0
        tables = [kv.table(seq, group) for group in range(len(kv.windows))]
        order = range(self.end - 1, first - 1, -1) if backwards else range(first, self.end)
        wanted = [(index, group) for index in order for group, table in enumerate(tables) if table[index]]
        loads = store.open([(stored[index - first].keys[group], stored[index - first].tier) for index, group in wanted])
        for (index, group), load in zip(wanted, loads, strict=True):
            self._loads.setdefault(index, []).append(load)
            self._deadline = max(self._deadline, load.deadline)
            if not load.pending:  # it has failed at once
                self._failed = True
                continue
            self._left += 1
            load.on_end = self._on_end
            kv.begin_copy((tables[group][index],))
            store.send(load, tables[group][index])
        store.flush_copies()

    @property
    def pending(self) -> bool:
        return self._left > 0

    def broken(self, now: float) -> bool:
        """Return whether the sequence must start over: a copy does not end, or a window misses what it must see."""
        return (self._left > 0 and now > self._deadline) or (self._windowed and self._failed)

    def loaded(self, index: int) -> Iterator[str]:
        """Yield the tier of each block from `index` on that has been loaded, up to the first that has not."""
        if self._windowed and (self._left or self._failed):
            return
        while index < self.end and (loads := self._loads.get(index)):
            if any(load.state is not LoadState.DONE for load in loads):
                return
            yield max((load.tier for load in loads), key=TIERS.index)
            index += 1

    def limit(self, index: int) -> int | None:
        """Return the first block from `index` on that need not be computed, because it is loaded or may be soon."""
        for at in range(max(index, self._first), self.end):
            loads = self._loads.get(at)
            if loads and all(load.state is not LoadState.FAILED for load in loads):
                return at
        return None

    def drop(self) -> None:
        for loads in self._loads.values():
            for load in loads:
                self._store.drop(load)

    def _on_end(self, load: Load) -> None:
        self._left -= 1
        self._failed |= load.state is LoadState.FAILED
        assert load.block is not None
        self._kv.end_copy((load.block,))


@dataclass(frozen=True)
class _Lookup:
    """What is asked for a waiting sequence: the blocks from `start` on, which the device did not have."""

    start: int
    keys: list[list[bytes]]  # block -> group -> key; not all of them yet
    rest: Iterator[list[bytes]]  # the others, digested one by one as somebody wants to know
    search: Search  # for the keys that there were when it began

    def row(self, index: int) -> list[bytes] | None:
        """Return the keys of one block after `start`; None: the prompt has no such block."""
        while index >= len(self.keys):
            row = next(self.rest, None)
            if row is None:
                return None
            self.keys.append(row)
        return self.keys[index]


class Lookups:
    """What the tiers hold of prompts that wait. One search a sequence, made when it is queued."""

    def __init__(self, kv: KVCache, store: SpillStore) -> None:
        self._kv = kv
        self._store = store
        self._lookups: dict[str, _Lookup] = {}
        self._prefetches: dict[str, list[Load]] = {}

    def ask(self, seq: str, tokens: Sequence[int], salt: str | None) -> bool:
        """Ask the tiers for what the device does not have of a prompt, and bring what lies far away nearer; return
        whether every tier has answered, or had its time to."""
        if seq not in self._lookups:
            self._start(seq, tokens, salt)
        return self._lookups[seq].search.ready(time.monotonic())

    def found(self, seq: str, tokens: Sequence[int], salt: str | None, have: int) -> list[StoredBlock]:
        """Return the blocks after the first `have`, as far as they can be restored."""
        if seq not in self._lookups or self._lookups[seq].start > have:  # the device has lost some of its blocks since
            self.forget(seq)
            self._start(seq, tokens, salt)
        lookup = self._lookups[seq]
        width = len(self._kv.windows)
        rows: list[tuple[list[str | None], list[bytes]]] = []
        for index in count(have - lookup.start):
            keys = lookup.row(index)
            if keys is None:
                break
            row = lookup.search.sources[index * width : (index + 1) * width] or [None] * width
            if None in row:  # not asked for, or it has left the device since
                row = [tier or self._store.near(key) for tier, key in zip(row, keys, strict=True)]
            if not any(row):
                break
            rows.append((row, keys))
        usable = usable_blocks([row for row, _ in rows], self._kv.windows, self._kv.block_size, have)
        return [StoredBlock(max((tier for tier in row if tier), key=TIERS.index), keys) for row, keys in rows[:usable]]

    def forget(self, seq: str) -> None:
        self._lookups.pop(seq, None)
        for load in self._prefetches.pop(seq, ()):
            self._store.drop(load)

    def _start(self, seq: str, tokens: Sequence[int], salt: str | None) -> None:
        start, digest = self._kv.cached_prefix(tokens, salt)
        size, groups = self._kv.block_size, range(len(self._kv.windows))
        tail = tokens[start * size : len(tokens) - 1]  # one token is always left to compute
        rest = ([block_key(each, group) for group in groups] for each in prefix_digests(tail, size, digest))
        # Host memory answers at once whenever it is asked; the other tiers are asked for all before it matters.
        keys = list(rest) if self._store.tiers else []
        search = self._store.search([key for row in keys for key in row])
        self._lookups[seq] = lookup = _Lookup(start, keys, rest, search)
        if self._store.keeps and self._store.tiers:
            self._prefetch(seq, lookup)

    def _prefetch(self, seq: str, lookup: _Lookup) -> None:
        """Bring what is on disk or in a remote store to host memory while the request waits, within half of it."""
        flat = (key for row in lookup.keys for key in row)
        wanted = [(key, tier) for key, tier in zip(flat, lookup.search.sources, strict=True)
                  if tier is not None and tier != "host"]
        room = self._store.prefetch_room - sum(len(loads) for loads in self._prefetches.values())
        if wanted and room > 0:
            self._prefetches[seq] = self._store.open(wanted[:room])
