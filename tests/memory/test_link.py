"""The CPU link: blocks are copied out and in byte for byte, no other byte changes, and invalid copies move nothing."""

from __future__ import annotations

import ctypes
import mmap
import random
import resource
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.kernels.huge_pages import address_of
from spillover.memory.spill.host import Slots
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.link import SlotMap, SlotViews
from spillover.memory.transfer.link_cpu import CpuLink

BLOCK = 96


def make_pool(num_blocks: int, block_bytes: int = BLOCK, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks + 1, block_bytes), dtype=np.uint8)


def make_link(pool: np.ndarray, **options: object) -> CpuLink:
    return CpuLink(memoryview(pool.reshape(-1)), pool.shape[1], CpuTransfers(), **options)  # type: ignore[arg-type]


def cut(memory: memoryview, size: int) -> list[memoryview]:
    return [memory[start : start + size] for start in range(0, memory.nbytes, size)]


class Halves:
    """A codec that keeps the first half of a block; the other half is decoded as zeros."""

    slot_bytes = BLOCK // 2

    def encode(self, block: memoryview, slot: memoryview) -> None:
        slot[:] = block[: self.slot_bytes]

    def decode(self, slot: memoryview, block: memoryview) -> None:
        block[: self.slot_bytes] = slot
        block[self.slot_bytes :] = bytes(self.slot_bytes)


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 15)), max_size=24), narrow=st.booleans(),
       seed=st.integers(0, 9))
def test_random_copies_equal_a_plain_model(moves: list[tuple[int, int]], narrow: bool, seed: int) -> None:
    """Random copies to slots and back leave pool and slots equal to lists of bytes, after each copy."""
    pool, random_ = make_pool(12, seed=seed), random.Random(seed)
    link = make_link(pool, codec=Halves() if narrow else None)
    slots = cut(link.allocate(16 * link.slot_bytes), link.slot_bytes)
    blocks_model, slots_model = [bytes(block) for block in pool], [bytes(slot) for slot in slots]
    for start in range(0, len(moves), 4):
        # One copy may name no block and no slot twice.
        blocks = list(dict.fromkeys(block for block, _ in moves[start : start + 4]))
        places = list(dict.fromkeys(slot for _, slot in moves[start : start + 4]))
        pairs = list(zip(blocks, places, strict=False))
        chosen = [slots[place] for _, place in pairs]
        if random_.random() < 0.5:
            link.copy_out([block for block, _ in pairs], chosen)
            for block, place in pairs:
                slots_model[place] = blocks_model[block][: link.slot_bytes]
        else:
            link.copy_in(chosen, [block for block, _ in pairs])
            for block, place in pairs:
                blocks_model[block] = slots_model[place].ljust(BLOCK, b"\0")
        assert [bytes(block) for block in pool] == blocks_model
        assert [bytes(slot) for slot in slots] == slots_model


def test_neighbours_are_one_copy() -> None:
    memory = memoryview(bytearray(10 * BLOCK))
    slots, base = cut(memory, BLOCK), address_of(memory)
    places = SlotMap(9, BLOCK)
    chosen = [0, 1, 5, 6, 7, 2]
    known = SlotViews(slots.__getitem__, chosen, base + np.array(chosen) * BLOCK, BLOCK)
    for views in ([slots[i] for i in chosen], known):
        runs = places.runs([3, 4, 5, 6, 8, 1], views)
        assert runs.blocks.tolist() == [3, 5, 8, 1]
        assert (runs.addresses - base).tolist() == [0, 5 * BLOCK, 7 * BLOCK, 2 * BLOCK]
        assert runs.counts.tolist() == [2, 2, 1, 1]
    assert places.runs([], []).counts.tolist() == []
    apart = places.runs([3, 2, 1], known[:3])
    assert (apart.blocks.tolist(), apart.counts.tolist()) == ([3, 2, 1], [1, 1, 1])
    assert (apart.addresses - base).tolist() == [0, BLOCK, 5 * BLOCK]


def test_every_slot_lies_where_its_address_says() -> None:
    slots = Slots(lambda nbytes: memoryview(bytearray(nbytes)), 3 << 20, 7)  # two per slab, and one in the last
    taken = [slots.acquire() for _ in range(7)]
    assert slots.acquire() is None
    numbers = [slot for slot in taken if slot is not None]
    views = slots.views(numbers)
    assert sorted(numbers) == list(range(7))
    assert len({view.nbytes for view in views}) == 1
    assert [address_of(view) for view in views] == views.addresses.tolist()
    for slot in numbers:
        slots.view(slot)[:] = bytes([slot + 1]) * slots.slot_bytes
    assert [views[i][-1] for i in range(7)] == [slot + 1 for slot in numbers]
    slots.check()


@pytest.mark.parametrize("codec", [None, Halves()])
@pytest.mark.parametrize("wrong", ["dummy", "beyond", "negative", "short slot", "long slot", "count"])
def test_a_wrong_block_or_slot_moves_nothing(wrong: str, codec: Halves | None) -> None:
    pool = make_pool(4)
    link = make_link(pool, codec=codec)
    memory = link.allocate(4 * BLOCK)
    slots = cut(memory[: 2 * link.slot_bytes], link.slot_bytes)
    blocks = [1, {"dummy": 0, "beyond": 5, "negative": -1}.get(wrong, 2)]
    if "slot" in wrong:
        slots[1] = memory[: link.slot_bytes + (1 if "long" in wrong else -1)]
    if wrong == "count":
        blocks.append(3)
    before = pool.copy()
    with pytest.raises(ValueError):
        link.copy_out(blocks, slots)
    with pytest.raises(ValueError):
        link.copy_in(slots, blocks)
    assert bytes(memory) == bytes(memory.nbytes)
    assert np.array_equal(pool, before)


def test_a_pool_must_be_writable_and_whole() -> None:
    with pytest.raises(ValueError, match="writable"):
        CpuLink(memoryview(bytes(4 * BLOCK)), BLOCK, CpuTransfers())
    with pytest.raises(ValueError, match="whole blocks"):
        CpuLink(memoryview(bytearray(4 * BLOCK + 1)), BLOCK, CpuTransfers())


def test_memory_begins_at_a_page_and_costs_nothing_before_it_is_touched() -> None:
    link = make_link(make_pool(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = link.allocate(4 << 30)
    assert (memory.nbytes, address_of(memory) % 4096, memory.readonly) == (4 << 30, 0, False)
    memory[memory.nbytes - 1] = 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert link.allocate(100).nbytes == 100


def test_memory_outlives_the_link_while_someone_looks_at_it() -> None:
    link = make_link(make_pool(1))
    memory = link.allocate(mmap.PAGESIZE)
    link.close()
    memory[:4] = b"here"
    assert ctypes.string_at(address_of(memory), 4) == b"here"


def test_other_threads_run_while_bytes_move() -> None:
    """Other threads run during a copy that takes far longer than the interpreter's switch interval."""
    size = 64 << 20
    pool = np.ones((3, size), dtype=np.uint8)
    link = make_link(pool)
    slots = cut(link.allocate(2 * size), size)
    stop, counts = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counts[0] += 1

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        seen = []
        for _ in range(4):
            before = counts[0]
            link.copy_out([1, 2], slots)
            seen.append(counts[0] - before)
    finally:
        stop.set()
        counter.join(30)
    assert min(seen) > 100
