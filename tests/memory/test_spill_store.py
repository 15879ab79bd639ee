"""Host memory between the device and a tier below: what counts as room there, and what is lost for want of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spillover.memory.spill.loads import Load
from spillover.memory.spill.store import SpillStore
from spillover.memory.tiers.base import Ticket
from support.simulated_tiers import DictTier

BYTES = 64
PATIENCE = 10.0  # seconds that anything here may take


class Link:
    """Copies that wait until they may."""

    slot_bytes = block_bytes = BYTES

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        assert self.open.wait(PATIENCE)
        for block, slot in zip(blocks, slots, strict=True):
            slot[:] = bytes([block]) * BYTES

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


class SlowTier(DictTier):
    """Writes wait until they may, too; loads do not wait for them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.open = threading.Event()
        self.open.set()

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [Ticket.ended(self._get(key, view)) for key, view in items]

    def _put(self, key: bytes, view: memoryview) -> bool:
        assert self.open.wait(PATIENCE)
        return super()._put(key, view)


@contextmanager
def stored(host_blocks: int) -> Iterator[tuple[SpillStore, Link, SlowTier]]:
    """A store that copies one block at a time and keeps two slots ready."""
    wake, link = threading.Event(), Link()
    tier = SlowTier(wake.set)
    store = SpillStore(link, [tier], host_blocks, rates={"host": BYTES / 0.003}, wake=wake)
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
        assert not tier.blocks  # two slots are free, as they should be
        link.open.clear()
        assert spill(store, [6, 7], ended) == 2
        until(store, lambda: len(tier.blocks) >= 2)  # while these are on their way, others are written down
        assert spill(store, [8, 9], ended) == 2
        link.open.set()
        until(store, lambda: len(ended) == 10)
        assert all(store.holds(key(block)) for block in range(10))
        assert store.reports()[0].dropped == 0


def crowded(store: SpillStore, tier: SlowTier) -> Load:
    """A load while all four slots have blocks that no tier has, and the tier takes none."""
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
        time.sleep(0.2)  # a step that takes long
        store.poll()
        assert load.entries
        assert store.rates["disk"] > BYTES / 0.1
        store.drop(load)
