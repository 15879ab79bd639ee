"""Host memory between the device and a tier below: what counts as free there, and what is lost if there is no room."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.memory.spill.loads import Load, LoadState
from spillover.memory.spill.store import SpillStore
from spillover.memory.tiers.base import Ticket
from support.simulated_tiers import DictTier

BYTES = 64
PATIENCE = 10.0  # maximum seconds of any operation here


class Link:
    """A link whose copies wait until `open` is set."""

    slot_bytes = block_bytes = BYTES

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fails: set[int] = set()  # blocks whose copies fail
        self.arrived: dict[int, int] = {}  # by block: what was copied to it
        self.largest = 0  # largest copy to the device, in blocks

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        assert self.open.wait(PATIENCE)
        for block, slot in zip(blocks, slots, strict=True):
            slot[:] = bytes([block]) * BYTES

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        assert self.open.wait(PATIENCE)
        self.largest = max(self.largest, len(blocks))
        if not self.fails.isdisjoint(blocks):
            raise OSError("injected")
        self.arrived.update((block, slot[0]) for block, slot in zip(blocks, slots, strict=True))

    def close(self) -> None:
        pass


class SlowTier(DictTier):
    """A tier whose writes also wait until `open` is set; loads do not wait for them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.open = threading.Event()
        self.open.set()
        self.damaged: set[bytes] = set()

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [Ticket.ended(key not in self.damaged and self._get(key, view)) for key, view in items]

    def _put(self, key: bytes, view: memoryview) -> bool:
        assert self.open.wait(PATIENCE)
        return super()._put(key, view)


@contextmanager
def stored(host_blocks: int, batch: int = 1) -> Iterator[tuple[SpillStore, Link, SlowTier]]:
    """Yield a store that copies `batch` blocks at a time and keeps twice as many slots free."""
    wake, link = threading.Event(), Link()
    tier = SlowTier(wake.set)
    store = SpillStore(link, [tier], host_blocks, rates={"host": 1.001 * batch * BYTES / 0.003}, wake=wake)
    try:
        yield store, link, tier
    finally:
        link.open.set()
        tier.open.set()
        store.close(time.monotonic() + PATIENCE)


def until(store: SpillStore, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        store.wait(0.01)
        store.poll()
        store.check()


def key(block: int) -> bytes:
    return bytes([block]) * 16


def spill(store: SpillStore, blocks: Sequence[int], ended: list[int]) -> int:
    return store.spill([(key(block), block) for block in blocks], lambda block, _: ended.append(block))


def test_a_slot_that_a_block_arrives_in_is_no_room() -> None:
    ended: list[int] = []
    with stored(8) as (store, link, tier):
        assert spill(store, range(6), ended) == 6
        until(store, lambda: len(ended) == 6)
        assert not tier.blocks  # two slots are free, as intended
        link.open.clear()
        assert spill(store, [6, 7], ended) == 2
        until(store, lambda: len(tier.blocks) >= 2)  # during these copies, others are written to the tier
        assert spill(store, [8, 9], ended) == 2
        link.open.set()
        until(store, lambda: len(ended) == 10)
        assert all(store.holds(key(block)) for block in range(10))
        assert store.reports()[0].dropped == 0


def crowded(store: SpillStore, tier: SlowTier) -> Load:
    """Return a load that is started while all four slots hold blocks not yet stored below, and the tier stalls."""
    tier.blocks[b"below"] = b"x" * BYTES
    tier.open.clear()
    ended: list[int] = []
    assert spill(store, range(4), ended) == 4
    until(store, lambda: len(ended) == 4)
    (load,) = store.open([b"below"], ["disk"])
    return load


def test_a_load_waits_for_a_slot_before_a_block_is_lost() -> None:
    with stored(4) as (store, _, tier):
        load = crowded(store, tier)
        store.poll()
        assert load.pending
        assert all(store.holds(key(block)) for block in range(4))
        tier.open.set()
        until(store, lambda: bool(load.entries))
        assert all(store.holds(key(block)) for block in range(4))
        assert store.reports()[0].dropped == 0
        store.drop(load)


def test_a_load_does_not_wait_for_a_tier_that_takes_nothing() -> None:
    with stored(4) as (store, _, tier):
        load = crowded(store, tier)
        until(store, lambda: bool(load.entries))
        assert store.reports()[0].dropped == 1
        store.drop(load)


def test_a_rate_is_that_of_the_load_not_of_who_looks_after_it() -> None:
    with stored(4) as (store, _, tier):
        tier.blocks[b"below"] = b"x" * BYTES
        (load,) = store.open([b"below"], ["disk"])
        time.sleep(0.2)  # a slow step
        store.poll()
        assert load.entries
        assert store.rates["disk"] > BYTES / 0.1
        store.drop(load)


@settings(deadline=None, max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_loads_bring_all_that_is_stored_and_fail_what_is_not(rng: random.Random) -> None:
    """Loads copy all blocks that are stored and fail the others: blocks in host memory, below it, damaged there or
    lost, loaded in runs while copies fail, loads are dropped and other blocks are spilled."""
    batch = rng.randint(1, 4)
    with stored(12, batch) as (store, link, tier):
        ended: list[int] = []
        above = rng.sample(range(20), rng.randint(0, 8))
        assert spill(store, above, ended) == len(above)
        until(store, lambda: not store.busy)
        below = [block for block in range(20) if block not in above and rng.random() < 0.5]
        tier.blocks.update((key(block), bytes([block]) * BYTES) for block in below)
        tier.damaged.update(key(block) for block in below if rng.random() < 0.3)
        asked = sorted(rng.sample(range(20), rng.randint(1, 12)))
        link.fails.update(100 + block for block in asked if rng.random() < 0.1)
        if rng.random() < 0.5:
            link.open.clear()

        loads = store.open([key(block) for block in asked], ["host" if block in above else "disk" for block in asked])
        assert [name for load in loads for name in load.keys] == [key(block) for block in asked]
        assert all(len(load.keys) <= batch for load in loads)
        numbers = {name: block for block, name in zip(asked, map(key, asked), strict=True)}
        under_way = [load for load in loads if load.pending]
        ends: list[Load] = []
        for load in under_way:
            load.on_end = ends.extend
        store.send(under_way, [100 + numbers[name] for load in under_way for name in load.keys])
        spill(store, range(30, 30 + rng.randint(0, 6)), ended)  # evicts blocks that no load holds
        dropped = [load for load in under_way if rng.random() < 0.1]
        for load in dropped:
            store.drop(load)
        link.open.set()
        until(store, lambda: not store.busy)

        assert link.largest <= batch
        assert len(ends) == len(under_way), "each ends once"
        assert {id(load) for load in ends} == {id(load) for load in under_way}
        together = {100 + numbers[name] for load in loads for name in load.keys} & link.fails
        for load in loads:
            blocks = [numbers[name] for name in load.keys]
            there = all(block in above or (block in below and key(block) not in tier.damaged) for block in blocks)
            assert not load.pending
            if load.state is LoadState.DONE:
                assert there
                assert [link.arrived[100 + block] for block in blocks] == blocks
            else:  # a failed copy may have included blocks of other loads
                assert not there or load in dropped or together
            assert not load.entries
        assert all(entry.pins == 0 for entry in store._host)


def test_blocks_that_host_memory_has_are_one_load_a_copy() -> None:
    with stored(12, batch=4) as (store, link, tier):
        ended: list[int] = []
        spill(store, range(10), ended)
        until(store, lambda: not store.busy)
        tier.blocks[b"below"] = b"x" * BYTES
        keys = [*map(key, range(6)), b"lost", *map(key, range(6, 10))]
        loads = store.open([*keys, b"below"], ["host"] * len(keys) + ["disk"])
        assert [len(load.keys) for load in loads] == [4, 2, 1, 4, 1]
        assert [load.pending for load in loads] == [True, True, False, True, True]
        under_way = [load for load in loads if load.pending]
        store.send(under_way, range(100, 111))
        until(store, lambda: not store.busy)
        assert [load.state for load in under_way] == [LoadState.DONE] * 4
        assert link.arrived == {100 + block: block for block in range(10)} | {110: ord("x")}
