"""Blocks that come back from other tiers: where a prompt's blocks are stored, and the loads of one sequence.

A sequence's table covers the blocks that are being loaded, as it covers those that are being computed. Any block whose
load fails is computed instead; any run of loaded blocks is skipped when the computing front reaches it. So a long
prefix can be computed from the front while it is loaded from the back, until the two meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spillover.memory.digest import block_key, prefix_digests
from spillover.memory.loads import Load, LoadState, Search
from spillover.memory.store import SpillStore

TIERS = ("host", "disk", "remote")  # nearest first


class Restore:
    """The loads of one sequence, by block."""

    def __init__(self, first: int, end: int, windowed: bool, store: SpillStore) -> None:
        self.end = end  # the block after the last that is loaded
        self.skipped: dict[str, int] = {}  # blocks taken over so far, by tier
        self._first = first
        self._windowed = windowed
        self._store = store
        self._loads: dict[int, list[tuple[Load, int]]] = {}  # block index -> loads and the device blocks they go to

    def add(self, index: int, load: Load, block: int) -> None:
        self._loads.setdefault(index, []).append((load, block))

    def blocks(self) -> Iterator[int]:
        for pairs in self._loads.values():
            for _, block in pairs:
                yield block

    def pairs(self) -> Iterator[tuple[Load, int]]:
        for pairs in self._loads.values():
            yield from pairs

    @property
    def pending(self) -> bool:
        return any(load.pending for load, _ in self.pairs())

    def broken(self, now: float) -> bool:
        """Whether the sequence had better start over: a copy does not end, or a window misses what it must see."""
        return any(
            (load.state is LoadState.COPYING and now > load.deadline)
            or (self._windowed and load.state is LoadState.FAILED)
            for load, _ in self.pairs()
        )

    def skip(self, index: int) -> int:
        """The first block from `index` on that is not loaded; what lies between is taken over, and counted."""
        if self._windowed and any(load.state is not LoadState.DONE for load, _ in self.pairs()):
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


class Restorer:
    """Finds and starts restores. One search a waiting sequence, made when it is queued."""

    def __init__(self, store: SpillStore, block_size: int, windows: Sequence[int | None], identity: bytes) -> None:
        self._store = store
        self._block_size = block_size
        self._windows = tuple(windows)
        self._identity = identity
        self._keys: dict[str, list[list[bytes]]] = {}  # sequence -> block -> group -> key
        self._searches: dict[str, Search] = {}
        self._prefetches: dict[str, list[Load]] = {}

    def seek(self, seq: str, tokens: Sequence[int], salt: str | None, have: int) -> None:
        """Asks the tiers for the blocks of a prompt of which the device has the first `have`, and brings those that
        lie far away nearer."""
        whole = (len(tokens) - 1) // self._block_size * self._block_size
        groups = range(len(self._windows))
        digests = prefix_digests(tokens[:whole], self._block_size, self._identity, salt)
        keys = self._keys[seq] = [[block_key(digest, group) for group in groups] for digest in digests]
        self._searches[seq] = self._store.search([key for row in keys[have:] for key in row])
        self._prefetch(seq, have)

    def ready(self, seq: str, now: float) -> bool:
        """Whether every tier has answered, or had its time to."""
        search = self._searches.get(seq)
        return search is None or search.ready(now)

    def found(self, seq: str, tokens: Sequence[int], salt: str | None, have: int) -> list[str]:
        """The tiers of the blocks after the first `have`, as far as they can be restored."""
        search = self._searches.get(seq)
        if search is None or seq not in self._keys:
            self.seek(seq, tokens, salt, have)
            search = self._searches[seq]
        keys = self._keys[seq]
        width = len(self._windows)
        asked = len(keys) - len(search.sources) // width  # blocks the device had when the question was put
        sources: list[list[str | None]] = []
        for index in range(have, len(keys)):
            at = (index - asked) * width
            row = search.sources[at : at + width] if index >= asked else self._store.search(keys[index]).sources
            if not any(row):
                break
            sources.append(row)
        count = self._usable(sources, have)
        return [max((tier for tier in row if tier), key=TIERS.index) for row in sources[:count]]

    def forget(self, seq: str) -> None:
        """The sequence is admitted, or no longer waits."""
        self._keys.pop(seq, None)
        self._searches.pop(seq, None)
        for load in self._prefetches.pop(seq, ()):
            self._store.drop(load)

    def start(self, seq: str, tables: Sequence[list[int]], sources: Sequence[str], first: int,
              backwards: bool) -> Restore:
        """The loads of blocks first .. first + len(sources), not sent yet."""
        end = first + len(sources)
        restore = Restore(first, end, any(window is not None for window in self._windows), self._store)
        order = range(end - 1, first - 1, -1) if backwards else range(first, end)
        wanted = [(index, group) for index in order for group, table in enumerate(tables) if table[index]]
        keys = self._keys[seq]
        loads = self._store.open([(keys[index][group], sources[index - first]) for index, group in wanted])
        for (index, group), load in zip(wanted, loads, strict=True):
            restore.add(index, load, tables[group][index])
        return restore

    def send(self, restore: Restore) -> None:
        for load, block in restore.pairs():
            if load.pending:
                self._store.send(load, block)
            else:
                load.block = block  # failed at once: the block is given back with the others
        self._store.flush_copies()

    def _prefetch(self, seq: str, have: int) -> None:
        """Brings what is on disk or in a remote store to host memory while the request waits, within half of it."""
        if not self._store.keeps:
            return
        search, keys = self._searches[seq], self._keys[seq]
        flat = [key for row in keys[have:] for key in row]
        wanted = [(key, tier) for key, tier in zip(flat, search.sources, strict=True) if tier not in (None, "host")]
        room = self._store.prefetch_room - sum(len(loads) for loads in self._prefetches.values())
        if wanted and room > 0:
            self._prefetches[seq] = self._store.open([(key, tier) for key, tier in wanted[:room] if tier is not None])

    def _usable(self, sources: Sequence[Sequence[str | None]], have: int) -> int:
        """The most blocks after which every group has all that the next position sees."""
        usable = 0
        run = [have] * len(self._windows)  # per group: blocks there without a gap up to here
        for count, row in enumerate(sources, start=1):
            position = (have + count) * self._block_size
            enough = True
            for group, window in enumerate(self._windows):
                run[group] = run[group] + 1 if row[group] else 0
                seen = 0 if window is None else max(0, position - window + 1) // self._block_size
                enough = enough and run[group] >= have + count - seen
            if enough:
                usable = count
        return usable
