"""Managed memory of CUDA with a simulated driver: never more than the card has free, and pages are evicted when their
space is needed, whatever the advice."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.engine.cuda.managed_memory import CudaManagedMemory
from spillover.engine.weights.managed import ManagedWeights
from spillover.engine.weights.placed import Parts
from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import HUGE_PAGE, address_of, map_pages
from spillover.memory.managed.pages import FAULT_AROUND, Pages
from spillover.memory.transfer.cuda_driver import (
    NO_PREFERRED_LOCATION,
    NOT_READ_MOSTLY,
    PREFERRED_LOCATION,
    READ_MOSTLY,
    CudaDriver,
)
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import LinkQueue
from spillover.plan.placement import MANAGED, WeightPlan

LAYERS = 5


class MadeUpDriver:
    """A driver that knows where each page is, and which pages have two copies."""

    def __init__(self, free: int, moves_pages: bool = True) -> None:
        self.free_now = free
        self._moves_pages = moves_pages
        self.memory: dict[int, memoryview] = {}
        self.here: set[int] = set()  # pages with a copy on the device
        self.host: set[int] = set()  # pages with a copy on the host
        self.read_mostly: set[int] = set()
        self.preferred: set[int] = set()  # pages whose preferred location is the host
        self.askew = 0  # bytes between a block's start and the start of an allocation

    def context(self, device: int) -> int:
        return 7

    def set_context(self, context: int) -> None:
        assert context == 7

    def moves_pages(self, device: int) -> bool:
        return self._moves_pages

    def free_memory(self) -> int:
        return self.free_now

    def allocate_managed(self, nbytes: int) -> int:
        memory = map_pages(max(nbytes, HUGE_PAGE))[self.askew : nbytes + self.askew]
        self.memory[address_of(memory)] = memory
        return address_of(memory)

    def free(self, address: int) -> None:
        del self.memory[address]

    def prefetch(self, address: int, nbytes: int, device: int | None, stream: int) -> None:
        for page in range(address, address + nbytes, FAULT_AROUND):
            to, other = (self.host, self.here) if device is None else (self.here, self.host)
            to.add(page)
            if page not in self.read_mostly:
                other.discard(page)

    def advise(self, address: int, nbytes: int, advice: int) -> None:
        for page in range(address, address + nbytes, FAULT_AROUND):
            if advice == READ_MOSTLY:
                self.read_mostly.add(page)
            elif advice == NOT_READ_MOSTLY:
                self.read_mostly.discard(page)
                if page in self.here and page in self.host:  # only one copy remains
                    (self.here if page in self.preferred else self.host).discard(page)
            elif advice == PREFERRED_LOCATION:
                self.preferred.add(page)
            else:
                assert advice == NO_PREFERRED_LOCATION
                self.preferred.discard(page)

    def touch(self, pages: Pages) -> None:
        """Read pages on the device."""
        for page in range(pages.address, pages.address + pages.nbytes, FAULT_AROUND):
            self.here.add(page)
            if page not in self.read_mostly:
                self.host.discard(page)


class OnTheHost(CudaManagedMemory):
    """Returns the simulated driver's memory as memory that the CPU computes with."""

    def allocate(self, nbytes: int) -> Any:
        self.kept = [*getattr(self, "kept", []), super().allocate(nbytes)]
        return cast(MadeUpDriver, self._driver).memory[self.kept[-1].address]


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None, wait_event=lambda event: None,
                             synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def managed(driver: MadeUpDriver, reserved: int = 0, oversubscribe: bool = False) -> OnTheHost:
    stream = SimpleNamespace(cuda_stream=1, wait_stream=lambda other: None, record_event=lambda: None)
    transfers = SimpleNamespace(device=torch.device("cpu"), stream=lambda priority: stream,
                                queue=LinkQueue(duplex=True, rate=1e9))
    return OnTheHost(cast(CudaTransfers, transfers), reserved, oversubscribe, cast(CudaDriver, driver))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=10), st.integers(0, 40), st.integers(0, 12), st.booleans())
def test_no_more_is_allocated_than_the_card_has_free(sizes: list[int], free: int, reserved: int, told: bool) -> None:
    driver = MadeUpDriver(free * 4096)
    memory, total = managed(driver, reserved * 4096, told), 0
    for size in sizes:
        if told or total + size <= free - reserved:
            memory.allocate(size * 4096)
            total += size
            continue
        with pytest.raises(SpilloverError, match=r"of managed memory do not fit .*; use --weights experts") as refusal:
            memory.allocate(size * 4096)
        assert "\n" not in str(refusal.value)
    assert sum(memory.nbytes for memory in driver.memory.values()) == total * 4096
    memory.kept = []
    assert driver.memory == {}


def test_a_card_that_fills_up_meanwhile_is_noticed() -> None:
    driver = MadeUpDriver(10 << 20)
    memory = managed(driver)
    memory.allocate(4 << 20)
    driver.free_now = 3 << 20
    with pytest.raises(SpilloverError, match="can hang the machine"):
        memory.allocate(4 << 20)


def test_memory_begins_at_a_block_of_the_driver() -> None:
    driver = MadeUpDriver(1 << 30)
    driver.askew = 4096
    buffer = CudaManagedMemory.allocate(managed(driver), 3 * HUGE_PAGE)
    ((start, memory),) = driver.memory.items()
    assert buffer.address % HUGE_PAGE == 0
    assert start <= buffer.address
    assert buffer.address + 3 * HUGE_PAGE <= start + memory.nbytes
    assert buffer.__cuda_array_interface__["data"] == (buffer.address, False)
    del buffer
    assert not driver.memory


def test_pages_that_are_needed_now_wait_for_the_evictions_that_make_room_for_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    driver = MadeUpDriver(1 << 30)
    monkeypatch.setattr(driver, "prefetch", lambda address, nbytes, device, stream: calls.append(
        ("evict" if device is None else "fetch", stream)))
    current = SimpleNamespace(cuda_stream=0, wait_event=lambda event: calls.append(("wait", event)),
                              wait_stream=lambda other: calls.append(("wait for all", 0)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    ahead = SimpleNamespace(cuda_stream=1, record_event=lambda: len(calls))
    memory = managed(driver)
    monkeypatch.setattr(memory._transfers, "stream", lambda priority: ahead)
    page = [Pages(0, FAULT_AROUND)]
    memory.to_host(page, ahead=True)
    memory.to_device(page, ahead=True)
    memory.to_device(page)
    memory.to_device(page)
    assert calls == [("evict", 1), ("fetch", 1), ("wait", 1), ("fetch", 0), ("fetch", 0)]
    counted = {each.priority: each.bytes // FAULT_AROUND for each in memory._transfers.queue.report().transfers}
    assert counted == {"restore": 0, "demand": 2, "prefetch": 1, "spill": 1}
    calls.clear()
    memory.to_host(page, ahead=True)
    memory.wait()
    memory.to_device(page)
    assert calls == [("evict", 1), ("wait for all", 0), ("fetch", 0)]


def test_a_device_whose_pages_do_not_move_is_refused() -> None:
    with pytest.raises(SpilloverError, match="use --weights demand"):
        managed(MadeUpDriver(1 << 30, moves_pages=False))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(MANAGED), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 2**32))
def test_pages_on_the_device_fit_under_every_strategy_and_their_bytes_stay(followed: list[str], spare: int,
                                                                           seed: int) -> None:
    driver, rng = MadeUpDriver(1 << 30), random.Random(seed)
    parts: Parts = [(f"layers.{layer}", {"norm": torch.full((20_000,), float(layer))}) for layer in range(LAYERS)]
    room = (2 + spare) * 2 * FAULT_AROUND
    weights = ManagedWeights(parts, WeightPlan("uvm", {}, {}, device_bytes=room), managed(driver), torch.device("cpu"))
    assert not driver.here
    for strategy in followed:
        weights.follow(strategy)
        assert not driver.here
        for _ in range(rng.randint(1, 3)):
            for index in range(LAYERS):
                with weights.part(f"layers.{index}") as part:
                    held = weights._parts[index].all_pages
                    if strategy == "uvm-prefetch":
                        assert set(range(held.address, held.address + held.nbytes, FAULT_AROUND)) <= driver.here
                    driver.touch(held)
                    assert len(driver.here) * FAULT_AROUND <= weights.nbytes <= room
                    assert set(part["norm"].tolist()) == {float(index)}
        assert bool(driver.read_mostly) == (strategy == "uvm-advise")
    weights.move(lambda tensor: tensor, asleep=True)
    assert not driver.here
    assert len(driver.host) == 2 * LAYERS
