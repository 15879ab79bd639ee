"""The pool of host memory, with a simulated driver: what it allocates, counts, pins and rejects."""

from __future__ import annotations

import itertools
import os
import random
import threading

import numpy as np
import pytest

from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import HUGE_PAGE, PAGE, address_of, make_file, map_file, map_pages
from spillover.memory.transfer.host_pool import HostPool


class Driver:
    """Records what is pinned, and checks that nothing is pinned or unpinned twice."""

    def __init__(self, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = refuses
        self._lock = threading.Lock()

    def populate(self, address: int, nbytes: int) -> None:
        assert address % PAGE == 0
        assert nbytes % PAGE == 0

    def register(self, address: int, nbytes: int) -> bool:
        with self._lock:
            assert address not in self.pinned, "pinned twice"
            if not self.refuses:
                self.pinned[address] = nbytes
        return not self.refuses

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.mark.parametrize("seed", range(20))
def test_random_use_equals_a_plain_model(seed: int) -> None:
    chance, driver = random.Random(seed), Driver()
    pool, held = HostPool(driver, limit=40 << 20), {}
    for _ in range(80):
        if held and chance.random() < 0.4:
            address = chance.choice(list(held))
            pool.free(address)
            del held[address]
        else:
            nbytes, use = chance.choice([1, 5000, 1 << 20, 3 << 20]), chance.choice(["weights", "kv"])
            pinned = use == "weights"
            used = sum(memory.nbytes for memory, _ in held.values())
            if used + nbytes > 40 << 20:
                with pytest.raises(MemoryError, match="over the budget"):
                    pool.allocate(nbytes, use, pinned)
                continue
            memory = pool.allocate(nbytes, use, pinned)
            memory[0] = memory[-1] = 7
            held[address_of(memory)] = memory, use
            assert (address_of(memory) in driver.pinned) == pinned
        if held and chance.random() < 0.3:
            wanted = chance.sample(list(held), min(3, len(held)))
            assert pool.pin([address + held[address][0].nbytes - 1 for address in wanted])
            assert all(address in driver.pinned for address in wanted)
        for use in ("weights", "kv"):
            assert pool.bytes_by_use.get(use, 0) == sum(memory.nbytes for memory, of in held.values() if of == use)
        assert driver.pinned.keys() <= held.keys()
    pool.release("kv")
    pool.close()
    assert not driver.pinned


def test_memory_that_is_not_of_the_pool_is_refused() -> None:
    pool = HostPool(Driver())
    memory = pool.allocate(2 * PAGE, "kv")
    assert pool.pin([address_of(memory), address_of(memory) + 2 * PAGE - 1])
    for outside in (address_of(memory) - 1, address_of(memory) + 2 * PAGE):
        with pytest.raises(ValueError, match="not of this pool"):
            pool.pin(np.array([address_of(memory), outside]))
    assert pool.pin([])


@pytest.mark.parametrize("seed", range(5))
def test_memory_of_others_is_pinned_piece_by_piece_as_copies_meet_it_and_let_go_of(seed: int) -> None:
    chance, driver = random.Random(seed), Driver()
    pool = HostPool(driver, limit=1 << 20)
    own = pool.allocate(1 << 20, "kv")
    pieces = chance.randrange(1, 9)
    shared = map_pages(pieces * 4 * PAGE)
    pool.adopt(shared, 4 * PAGE)
    assert not driver.pinned
    met = sorted(chance.sample(range(pieces), chance.randrange(1, pieces + 1)))
    for piece in [*met, *met]:
        assert pool.pin([address_of(shared) + piece * 4 * PAGE + chance.randrange(4 * PAGE), address_of(own)])
    assert driver.pinned == {address_of(shared) + piece * 4 * PAGE: 4 * PAGE for piece in met} | {
        address_of(own): 1 << 20}
    assert pool.bytes_by_use == {"kv": 1 << 20}, "what others own counts"
    pool.disown(shared)
    assert list(driver.pinned) == [address_of(own)]
    with pytest.raises(ValueError, match="not of this pool"):
        pool.pin([address_of(shared)])
    shared.release()  # the last reference to it
    pool.release("kv")
    assert not driver.pinned


def test_what_cannot_be_pinned_is_refused_for_weights_and_slower_for_kv() -> None:
    pool = HostPool(Driver(refuses=True))
    with pytest.raises(SpilloverError, match="could not be pinned"):
        pool.allocate(1 << 20, "weights", pinned=True)
    assert not pool.pin([address_of(pool.allocate(1 << 20, "kv"))])
    assert pool.bytes_by_use == {"weights": 0, "kv": 1 << 20}, "what was refused still counts"


def test_what_is_expected_is_pinned_meanwhile_and_handed_out_in_order() -> None:
    driver = Driver()
    pool = HostPool(driver)
    pool.expect(3 << 20, 4, "weights")
    taken = [pool.allocate(3 << 20, "weights", pinned=True) for _ in range(4)]
    assert len({address_of(memory) for memory in taken}) == 4 == len(driver.pinned)
    pool.close()
    assert not driver.pinned


def test_a_sleep_does_not_count_for_the_budget() -> None:
    pool = HostPool(limit=1 << 20)
    pool.allocate(1 << 20, "kv")
    asleep = pool.allocate(8 << 20, "sleep")
    pool.free(address_of(asleep))
    with pytest.raises(MemoryError, match=r"1\.0 MiB are in use"):
        pool.allocate(1, "kv")


@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 3])
def test_pages_begin_where_they_should_and_leave_a_gap(nbytes: int) -> None:
    views = sorted((map_pages(nbytes) for _ in range(8)), key=address_of)
    for view in views:
        assert view.nbytes == nbytes
        assert address_of(view) % (HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE) == 0
        assert not any(view[:PAGE])
        assert not view.readonly
    for left, right in itertools.pairwise(views):
        assert address_of(left) + left.nbytes < address_of(right)


def test_a_file_in_memory_is_shared_and_keeps_its_size() -> None:
    """If a process could truncate the file, every other one that touches it would be killed."""
    descriptor = make_file("spillover-test", 3 * PAGE)
    one, other = map_file(descriptor, 3 * PAGE), map_file(descriptor, 2 * PAGE)
    one[PAGE] = 7
    assert other[PAGE] == 7
    for size in (PAGE, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    assert one[PAGE] == 7
