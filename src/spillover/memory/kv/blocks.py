"""The block pool: the state of every block and the number of sequences that hold it.

The pool handles ids only, not the contents of blocks or which are worth keeping.
Block 0 is the dummy block, which padding reads and writes; it is never allocated and not counted.
"""

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NoReturn


class BlockState(IntEnum):
    FREE = 0  # unused; may be allocated
    FILLING = 1  # held by one sequence; some slots are not computed yet
    READY = 2  # every slot is computed; held by at least one sequence
    EVICTABLE = 3  # every slot is computed; kept in the prefix tree, held by no sequence
    IN_FLIGHT = 4  # read or written by a copy to or from another tier
    ABSENT = 5  # not part of the pool at present: its bytes are used for something else


FREE, FILLING, READY, EVICTABLE, IN_FLIGHT, ABSENT = BlockState


class BlockPool:
    """The states of blocks 1..num_blocks, and of blocks up to `most` once they are added.

    Each method changes the states of several blocks, in order. An illegal transition raises AssertionError: it is a
    bug, never a condition to handle.

    A block is *cached* while the prefix tree keeps it; that alone decides whether it becomes EVICTABLE or FREE when its
    last reference is dropped. A block in flight keeps its references and cached mark, which give its state afterwards.
    """

    def __init__(self, num_blocks: int, most: int | None = None) -> None:
        self.most = max(num_blocks, most or 0)
        self._state = [FREE] * (num_blocks + 1) + [ABSENT] * (self.most - num_blocks)
        self._refs = [0] * (self.most + 1)
        self._cached = bytearray(self.most + 1)
        self._loading: set[int] = set()  # blocks in flight that were FILLING, and are again when the copy ends
        self._free = list(range(num_blocks, 0, -1))
        self._counts = [num_blocks, 0, 0, 0, 0, self.most - num_blocks]  # number of blocks by BlockState

    @property
    def num_blocks(self) -> int:
        return self.most - self._counts[ABSENT]

    @property
    def free(self) -> int:
        return self._counts[FREE]

    @property
    def evictable(self) -> int:
        return self._counts[EVICTABLE]

    @property
    def protected(self) -> int:
        return self._counts[FILLING] + self._counts[READY]

    @property
    def in_flight(self) -> int:
        return self._counts[IN_FLIGHT]

    def state(self, block: int) -> BlockState:
        return self._state[block]

    def refs(self, block: int) -> int:
        return self._refs[block]

    def cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def used(self) -> list[int]:
        """Return the blocks that are in use or cached."""
        return [block for block, state in enumerate(self._state) if state not in (FREE, ABSENT)]

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks: ABSENT -> FREE."""
        for block in blocks:
            if self._state[block] is not ABSENT:
                self._illegal("add", block, ABSENT)
            self._move(block, FREE)
            self._free.append(block)

    def remove(self, blocks: Collection[int]) -> None:
        """Remove blocks: FREE -> ABSENT."""
        for block in blocks:
            if self._state[block] is not FREE:
                self._illegal("remove", block, FREE)
            self._move(block, ABSENT)
        self._free = [block for block in self._free if block not in blocks]

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks: FREE -> FILLING, with one reference. The caller has ensured that `count` are free."""
        if count > len(self._free):
            raise AssertionError(f"allocate() of {count} blocks with {len(self._free)} FREE")
        at = len(self._free) - count
        blocks = self._free[at:][::-1]
        del self._free[at:]
        for block in blocks:
            self._refs[block] = 1
            self._state[block] = FILLING
        self._count(FREE, FILLING, count)
        return blocks

    def complete(self, blocks: Iterable[int]) -> None:
        """Mark blocks complete, as every slot now has computed KV: FILLING -> READY."""
        states, complete = self._state, 0
        try:
            for block in blocks:
                if states[block] is not FILLING:
                    self._illegal("complete", block, FILLING)
                states[block] = READY
                complete += 1
        finally:
            self._count(FILLING, READY, complete)

    def ref(self, blocks: Iterable[int]) -> None:
        """Add a reference to complete blocks: EVICTABLE -> READY."""
        states, refs, taken = self._state, self._refs, 0
        try:
            for block in blocks:
                state = states[block]
                if state is EVICTABLE:
                    states[block] = READY
                    taken += 1
                elif state is not READY and (state is not IN_FLIGHT or block in self._loading):
                    self._illegal("ref", block, READY, EVICTABLE)
                refs[block] += 1
        finally:
            self._count(EVICTABLE, READY, taken)

    def unref(self, blocks: Iterable[int]) -> None:
        """Drop a reference; after the last one a block is EVICTABLE if cached, otherwise FREE, unless in flight."""
        states, refs, cached, idle = self._state, self._refs, self._cached, 0
        try:
            for block in blocks:
                if refs[block] == 0:
                    self._illegal("unref", block, FILLING, READY)
                refs[block] -= 1
                if refs[block] == 0:
                    state = states[block]
                    if state is READY and cached[block]:
                        states[block] = EVICTABLE
                        idle += 1
                    elif state is not IN_FLIGHT:
                        self._resolve_state(block)
        finally:
            self._count(READY, EVICTABLE, idle)

    def cache(self, blocks: Iterable[int]) -> None:
        """Mark blocks that the prefix tree keeps from now on."""
        for block in blocks:
            if self._state[block] is not READY or self._cached[block]:
                self._illegal("cache", block, READY)
            self._cached[block] = 1

    def uncache(self, blocks: Iterable[int]) -> None:
        """Unmark blocks that the prefix tree no longer keeps: EVICTABLE -> FREE, others once released and copied."""
        for block in blocks:
            if not self._cached[block]:
                self._illegal("uncache", block, READY, EVICTABLE, IN_FLIGHT)
            self._cached[block] = 0
            if self._state[block] is EVICTABLE:
                self._resolve_state(block)

    def evict(self, blocks: Iterable[int]) -> None:
        """Evict blocks: EVICTABLE -> FREE."""
        states, cached, free, before = self._state, self._cached, self._free, len(self._free)
        try:
            for block in blocks:
                if states[block] is not EVICTABLE:
                    self._illegal("evict", block, EVICTABLE)
                cached[block] = 0
                states[block] = FREE
                free.append(block)
        finally:
            self._count(EVICTABLE, FREE, len(free) - before)

    def begin_copy(self, blocks: Iterable[int]) -> None:
        """Begin a copy that reads or writes these blocks: none is reused, freed or evicted before end_copy()."""
        states, counts, begun = self._state, self._counts, 0
        try:
            for block in blocks:
                state = states[block]
                if state is FREE or state is IN_FLIGHT:
                    self._illegal("begin_copy", block, FILLING, READY, EVICTABLE)
                if state is FILLING:
                    self._loading.add(block)
                states[block] = IN_FLIGHT
                counts[state] -= 1
                begun += 1
        finally:
            counts[IN_FLIGHT] += begun

    def end_copy(self, blocks: Iterable[int]) -> None:
        """End a completed copy; the references and the cached mark of each block give its new state."""
        for block in blocks:
            if self._state[block] is not IN_FLIGHT:
                self._illegal("end_copy", block, IN_FLIGHT)
            self._resolve_state(block)

    def check(self) -> None:
        """Assert that recounted states agree with all counters and invariants."""
        blocks = range(1, self.most + 1)
        for state in BlockState:
            found = sum(self._state[block] is state for block in blocks)
            assert found == self._counts[state], f"{state.name}: {found} blocks, {self._counts[state]} counted"
        assert self.free + self.evictable + self.protected + self.in_flight == self.num_blocks
        assert len(self._free) == len(set(self._free)) == self.free, "the free list holds a block twice or lost one"
        assert all(self._state[block] is FREE for block in self._free)
        for block in blocks:
            state, refs, cached = self._state[block], self._refs[block], self._cached[block]
            where = f"block {block} is {state.name} with {refs} references, cached {cached}"
            if state in (FREE, ABSENT):
                assert (refs, cached) == (0, 0), where
            elif state is FILLING:
                assert (refs, cached) == (1, 0), where
            elif state is READY:
                assert refs > 0, where
            elif state is EVICTABLE:
                assert (refs, cached) == (0, 1), where
            else:
                assert refs >= 0, where
            assert block not in self._loading or state is IN_FLIGHT, where

    def _resolve_state(self, block: int) -> None:
        incomplete = block in self._loading
        if incomplete:
            self._loading.remove(block)
        if self._refs[block]:
            self._move(block, FILLING if incomplete else READY)
        elif self._cached[block]:
            self._move(block, EVICTABLE)
        else:
            self._move(block, FREE)
            self._free.append(block)

    def _count(self, before: BlockState, after: BlockState, blocks: int) -> None:
        self._counts[before] -= blocks
        self._counts[after] += blocks

    def _move(self, block: int, to: BlockState) -> None:
        self._counts[self._state[block]] -= 1
        self._counts[to] += 1
        self._state[block] = to

    def _illegal(self, operation: str, block: int, *wanted: BlockState) -> NoReturn:
        raise AssertionError(
            f"{operation}() on block {block}, which is {self._state[block].name} "
            f"with {self._refs[block]} references; it must be {' or '.join(state.name for state in wanted)}"
        )
