"""Restoring blocks from other tiers: the lookup of a prompt's blocks, and the loads of one sequence.

A sequence's table covers the blocks that are being loaded, as it covers those that are being computed. A block whose
load fails is computed instead; a run of loaded blocks is skipped when the computation reaches it. So a long prefix can
be computed from the front while it is loaded from the back, until the two meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, zip_longest
from typing import NamedTuple

from spillover.memory.kv.digest import prefix_keys
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.kv.windows import usable_blocks
from spillover.memory.spill.loads import Load, LoadState, Search
from spillover.memory.spill.restore_plan import ComputeCost
from spillover.memory.spill.store import SpillStore

TIERS = ("host", "pool", "disk", "remote")  # names of the tiers, nearest first
STARTED_AT_ONCE = 128  # number of blocks whose loads are started together
LOOKUP_BLOCKS = 32  # number of blocks whose keys are digested together before a lookup in host memory
COMING_SECONDS = 1.0  # maximum wait in seconds for blocks that another engine is storing
AGAIN_SECONDS = 0.002  # seconds between two lookups of these blocks
LEAST_SECONDS = 0.01  # minimum wait in seconds for one more of them: shorter than the step that would compute them


class Stored(NamedTuple):
    """Consecutive blocks of a prompt that can be loaded."""

    tiers: list[str]  # per block, the farthest of the tiers that store its layer groups
    keys: list[bytes]  # keys of all blocks; those of a block's layer groups are consecutive


class Restore:
    """The loads of one sequence, by block."""

    def __init__(self, kv: KVCache, store: SpillStore, seq: str, first: int, stored: Stored, backwards: bool) -> None:
        """Start loading the sequence's blocks from index `first` on, which its tables cover."""
        self.end = first + len(stored.tiers)  # index after the last block to load
        self._kv = kv
        self._store = store
        self._first = first
        self._tiers = stored.tiers
        self._windowed = any(window is not None for window in kv.windows)
        self._failed = False
        self._left = 0  # number of blocks whose load has not completed
        self._deadline = 0.0
        width, count = len(kv.windows), len(stored.tiers)
        # The load of each block; those of a block's layer groups are consecutive. None for blocks outside the window.
        self._loads: list[Load | None] = [None] * (count * width)
        tables = [kv.table(seq, group)[first : self.end] for group in range(width)]
        to = list(chain.from_iterable(zip(*tables, strict=True)))  # device blocks, in the order of `_loads`
        wanted = [place for place, block in enumerate(to) if block]
        if backwards:
            wanted.reverse()
        batch = store.copies.batch
        at_once = STARTED_AT_ONCE // batch * batch or STARTED_AT_ONCE  # a multiple of the batch, unless that is larger
        for start in range(0, len(wanted), at_once):  # the link copies some while the next are started
            places = wanted[start : start + at_once]
            self._start(places, [to[place] for place in places], [stored.keys[place] for place in places],
                        [stored.tiers[place // width] for place in places])

    def _start(self, places: Sequence[int], blocks: Sequence[int], keys: Sequence[bytes],
               tiers: Sequence[str]) -> None:
        loads = self._store.open(keys, tiers)
        self._deadline = loads[-1].deadline
        each = [load for load in loads for _ in load.keys]
        for place, load in zip(places, each, strict=True):
            self._loads[place] = load
        for load in loads:
            load.on_end = self._on_end
        under_way = [load for load in loads if load.state is not LoadState.FAILED]
        if len(under_way) < len(loads):  # some failed immediately
            self._failed = True
            blocks = [block for block, load in zip(blocks, each, strict=True) if load.state is not LoadState.FAILED]
        self._left += len(blocks)
        self._kv.begin_copy(blocks)
        self._store.send(under_way, blocks)

    @property
    def pending(self) -> bool:
        return self._left > 0

    def broken(self, now: float) -> bool:
        """Return whether the sequence must start over: a load missed its deadline, or a window lacks a block."""
        return (self._left > 0 and now > self._deadline) or (self._windowed and self._failed)

    def loaded(self, index: int) -> dict[str, int]:
        """Return by tier how many blocks from `index` on have been loaded, up to the first that has not been."""
        counts: dict[str, int] = {}
        if index < self._first or (self._windowed and (self._left or self._failed)):
            return counts
        for (row, found), run in groupby(zip(self._rows(index), self._tiers[index - self._first :], strict=True)):
            tier = ""
            for load in row:
                if load is not None:
                    if load.state is not LoadState.DONE:
                        return counts
                    tier = load.tier if tier in ("", load.tier) else max(tier, load.tier, key=TIERS.index)
            tier = tier or found  # outside every layer's window, so no part of it had to be loaded
            counts[tier] = counts.get(tier, 0) + sum(1 for _ in run)
        return counts

    def limit(self, index: int) -> int | None:
        """Return the index of the first block from `index` on that is loaded or may be soon; None if there is none."""
        start = max(index, self._first)
        for at, row in enumerate(self._rows(start), start):
            if all(load is None or load.state is not LoadState.FAILED for load in row):
                return at
        return None

    def drop(self) -> None:
        for load in dict.fromkeys(filter(None, self._loads)):
            self._store.drop(load)

    def _rows(self, index: int) -> Iterator[tuple[Load | None, ...]]:
        """Return the loads of each block from `index` on."""
        width = len(self._kv.windows)
        each = iter(self._loads[(index - self._first) * width :])
        return zip(*[each] * width, strict=True)

    def _on_end(self, loads: Sequence[Load]) -> None:
        blocks = [block for load in loads for block in load.blocks]
        self._left -= len(blocks)
        self._failed |= any(load.state is LoadState.FAILED for load in loads)
        self._kv.end_copy(blocks)


@dataclass
class _Lookup:
    """The lookup of a waiting sequence: its blocks from index `start` on, which the device did not have."""

    start: int
    keys: list[bytes]  # keys digested so far; those of a block's layer groups are consecutive
    rest: Iterator[bytes]  # the remaining keys, digested when they are needed
    search: Search  # the search for the keys digested before it began
    missing: int = -1  # number of keys that no tier had at the last check of should_wait(); -1 before the first
    since: float = 0.0  # time of the first check
    latest: float = 0.0  # time of the last check that found more keys
    again: float = 0.0  # time of the next search

    def digest(self, end: int) -> None:
        """Digest keys until there are `end` of them, or all."""
        self.keys.extend(islice(self.rest, max(0, end - len(self.keys))))


class Lookups:
    """The lookups of waiting prompts in the tiers. Each sequence has one search, made when it is queued."""

    def __init__(self, kv: KVCache, store: SpillStore) -> None:
        self._kv = kv
        self._store = store
        self._lookups: dict[str, _Lookup] = {}
        self._prefetches: dict[str, list[Load]] = {}

    def lookup(self, seq: str, tokens: Sequence[int], salt: str | None) -> bool:
        """Look up the part of a prompt that the device lacks, and prefetch blocks from slow tiers; return whether every
        tier has answered or timed out. Host memory, which answers at once, is checked again in found()."""
        if not self._store.tiers:
            return True
        if seq not in self._lookups:
            self._start(seq, tokens, *self._kv.cached_prefix(tokens, salt))
        return self._lookups[seq].search.ready(time.monotonic())

    def should_wait(self, seq: str, cost: ComputeCost, now: float) -> bool:
        """Return whether to wait for blocks that another engine is storing: while more of them keep arriving, each
        within the time that computing the missing ones would take."""
        lookup = self._lookups.get(seq)
        missing = 0 if lookup is None else lookup.search.sources.count(None)
        if lookup is None or not missing:
            return False
        if lookup.missing < 0:
            lookup.since = now
        if missing != lookup.missing:
            lookup.missing, lookup.latest = missing, now
        if cost.token_seconds is not None:
            computing = missing / len(self._kv.windows) * self._kv.block_size * cost.token_seconds
            if now - lookup.latest > max(computing, LEAST_SECONDS):
                return False
        if now - lookup.since > COMING_SECONDS:
            return False
        if now >= lookup.again:
            lookup.again = now + AGAIN_SECONDS
            self._store.search_again(lookup.search, lookup.keys)
        return True

    def found(self, seq: str, tokens: Sequence[int], salt: str | None, have: int) -> Stored:
        """Return the blocks after the first `have` that can be restored."""
        if (len(tokens) - 1) // self._kv.block_size <= have:
            return Stored([], [])
        if seq not in self._lookups or self._lookups[seq].start > have:  # the device evicted some of its blocks since
            self.forget(seq)
            self._start(seq, tokens, *self._kv.ready_prefix(seq, salt))
        lookup, width = self._lookups[seq], len(self._kv.windows)
        first, at_once = (have - lookup.start) * width, LOOKUP_BLOCKS * width
        tiers: list[str | None] = []
        while True:
            at = first + len(tiers)
            lookup.digest(at + at_once)
            keys = lookup.keys[at : at + at_once]
            part = lookup.search.sources[at : at + at_once]
            if None in part or not part:  # not searched for, not found, or spilled since the search
                part = [tier or near for tier, near in zip_longest(part, self._store.near(keys))]
            tiers += part
            rows = range(at - first, len(tiers), width) if None in part else ()
            gap = next((row for row in rows if not any(tiers[row : row + width])), None)
            if gap is not None or not keys:
                break
        if gap is not None:
            del tiers[gap:]
        keys = lookup.keys[first : first + len(tiers)]
        if width == 1:
            return Stored([tier for tier in tiers if tier], keys)
        blocks = list(zip(*(tiers[group::width] for group in range(width)), strict=True))
        usable = usable_blocks(blocks, self._kv.windows, self._kv.block_size, have)
        return Stored([_farthest(block) for block in blocks[:usable]], keys[: usable * width])

    def forget(self, seq: str) -> None:
        self._lookups.pop(seq, None)
        for load in self._prefetches.pop(seq, ()):
            self._store.drop(load)

    def _start(self, seq: str, tokens: Sequence[int], start: int, digest: bytes) -> None:
        """Start the lookup of the blocks from `start` on, which follow a prefix with this digest."""
        size = self._kv.block_size
        tail = tokens[start * size : len(tokens) - 1]  # one token is always left to compute
        rest = prefix_keys(tail, size, digest, len(self._kv.windows))
        # Host memory answers at once, so its keys are digested in found(); other tiers are asked for all keys now.
        keys = list(rest) if self._store.tiers else []
        search = self._store.search(keys)
        self._lookups[seq] = lookup = _Lookup(start, keys, rest, search)
        if self._store.keeps and self._store.tiers:
            self._prefetch(seq, lookup)

    def _prefetch(self, seq: str, lookup: _Lookup) -> None:
        """Load blocks of lower tiers to at most half of host memory while the request waits."""
        wanted = [(key, tier) for key, tier in zip(lookup.keys, lookup.search.sources, strict=True)
                  if tier is not None and tier != "host" and not self._store.direct.reaches(tier)]
        room = self._store.prefetch_room - sum(len(loads) for loads in self._prefetches.values())
        if wanted and room > 0:
            self._prefetches[seq] = self._store.open(*zip(*wanted[:room], strict=True))


def _farthest(tiers: Sequence[str | None]) -> str:
    return max(filter(None, tiers), key=TIERS.index)
