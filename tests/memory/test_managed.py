"""Managed memory stays within its limit whatever is used, and its emulation counts the pages that move in and out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spillover.kernels.huge_pages import address_of
from spillover.memory.managed.emulated import PAGE, EmulatedMemory
from spillover.memory.managed.pages import FAULT_AROUND, Pages, joined
from spillover.memory.managed.residency import Residency
from spillover.memory.transfer.link_queue import Priority

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)
uses = st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.sets(st.integers(0, 7))), max_size=30)


@given(sizes, st.integers(1, 40), uses)
def test_what_is_held_fits_and_what_was_used_last_stays(sizes: list[int], room: int, uses: Any) -> None:
    residency, order = Residency(dict(enumerate(sizes)), room), list[int]()  # least recently used first
    for wanted, keep in uses:
        wanted, keep = sorted(unit for unit in wanted if unit < len(sizes)), set(keep)
        before, change = list(residency.held), residency.use(wanted, keep)
        if change is None:
            stays = {*wanted, *(keep & set(before))}
            assert sum(sizes[unit] for unit in stays) > room
            assert list(residency.held) == before
            continue
        assert set(change.fetched) == set(wanted) - set(before)
        assert not {*change.evicted} & {*wanted, *keep}
        assert set(change.evicted) <= set(before)
        may_leave = [unit for unit in order if unit not in wanted and unit not in keep]
        assert list(change.evicted) == may_leave[: len(change.evicted)]
        last = change.evicted[-1:]
        if last:  # one less would not have been enough
            assert residency.held_bytes + sizes[last[0]] > room
        order = [unit for unit in order if unit not in (*wanted, *change.evicted)] + wanted
        assert list(residency.held) == order
        assert residency.held_bytes == sum(sizes[unit] for unit in order) <= room
        assert residency.peak_bytes >= residency.held_bytes
    assert residency.clear() == tuple(order)
    assert residency.held_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=12))
def test_ranges_beside_each_other_are_one(ranges: list[tuple[int, int]]) -> None:
    taken: set[int] = set()
    pages = []
    for address, nbytes in ranges:
        if not taken & set(range(address, address + nbytes)):
            taken |= set(range(address, address + nbytes))
            pages.append(Pages(address, nbytes))
    found = joined(pages)
    assert [byte for each in found for byte in range(each.address, each.address + each.nbytes)] == sorted(taken)
    assert all(later.address > each.address + each.nbytes for each, later in itertools.pairwise(found))


class Now:
    """Does at once the work of a thread."""

    def submit(self, work: Callable[[], None], nbytes: int, priority: Priority) -> str:
        work()
        return "ticket"

    def wait(self, ticket: str) -> None:
        assert ticket == "ticket"


def test_pages_come_when_they_are_touched_and_go_with_their_bytes_kept() -> None:
    memory = EmulatedMemory(Now())
    assert memory.faults == 0
    count, chunk = 8, FAULT_AROUND // PAGE
    buffer = memory.allocate(count * FAULT_AROUND)
    array, start = np.frombuffer(buffer, dtype=np.uint8), address_of(buffer)
    assert start % FAULT_AROUND == 0
    chunks = [Pages(start + index * FAULT_AROUND, FAULT_AROUND) for index in range(count)]
    array[:] = np.arange(len(array)) % 251
    assert memory.faults == count * chunk
    memory.to_host(joined(chunks))
    assert sum(map(memory.mapped, chunks)) == 0
    loaded = memory.faults
    assert array[3 * FAULT_AROUND + 5] == (3 * FAULT_AROUND + 5) % 251  # only this chunk is fetched
    assert [index for index, each in enumerate(chunks) if memory.mapped(each)] == [3]
    touched = memory.faults - loaded
    assert 0 < touched <= chunk
    memory.to_device(chunks[:2], ahead=True)
    memory.wait()
    assert [memory.mapped(each) for each in chunks[:2]] == [chunk, chunk]
    assert (array[: 2 * FAULT_AROUND] == np.arange(2 * FAULT_AROUND) % 251).all()
    assert memory.faults == loaded + touched  # prefetched chunks cause no page fault
    memory.to_host(chunks)
    assert memory.faults == loaded + touched


class Later:
    """Does the work of a thread when it is waited for, in the order in which it was submitted."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None], nbytes: int, priority: Priority) -> int:
        self._queued.append(work)
        return len(self._queued)

    def wait(self, ticket: int) -> None:
        for index in range(ticket):
            self._queued[index]()
            self._queued[index] = lambda: None


def test_pages_that_are_needed_now_wait_for_the_evictions_that_make_room_for_them() -> None:
    memory = EmulatedMemory(Later())
    buffer = memory.allocate(3 * FAULT_AROUND)
    start = address_of(buffer)
    first, second, third = (Pages(start + index * FAULT_AROUND, FAULT_AROUND) for index in range(3))
    memory.to_device([first])
    memory.to_host([first], ahead=True)
    memory.to_device([second], ahead=True)
    assert [memory.mapped(each) > 0 for each in (first, second, third)] == [True, False, False]
    memory.to_device([third])
    assert [memory.mapped(each) > 0 for each in (first, second, third)] == [False, False, True]
    memory.wait()
    assert [memory.mapped(each) > 0 for each in (first, second, third)] == [False, True, True]
