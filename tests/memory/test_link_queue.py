"""Priorities on the link: the order of copies, no starvation, and what is counted."""

from __future__ import annotations

import threading
import time

import pytest

from spillover.memory.transfer import link_queue
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.link_queue import LinkQueue, Priority, QueuedCopy

MB = 1 << 20


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_queue, "MAX_WAIT_SECONDS", 30.0)


def start(queue: LinkQueue, priority: Priority, order: list[str]) -> tuple[threading.Thread, QueuedCopy]:
    """Start a copy on a separate thread; return once it waits for the link."""
    copy = QueuedCopy(priority, MB)
    before = waiting(queue)

    def run() -> None:
        with queue.admit(copy):
            order.append(copy.priority.name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while waiting(queue) == before:
        time.sleep(0.001)
    return thread, copy


def waiting(queue: LinkQueue) -> int:
    return sum(each.waiting for each in queue.report().transfers)


@pytest.mark.usefixtures("patient")
def test_what_waits_goes_by_its_priority_and_not_by_its_time() -> None:
    queue, order = LinkQueue(duplex=False, rate=1e9), []
    with queue.admit(QueuedCopy(Priority.RESTORE, MB)):
        threads = [start(queue, priority, order)[0]
                   for priority in (Priority.SPILL, Priority.PREFETCH, Priority.DEMAND)]
        assert not order
    for thread in threads:
        thread.join(10)
    assert order == ["DEMAND", "PREFETCH", "SPILL"]


@pytest.mark.usefixtures("patient")
def test_a_prefetch_that_is_waited_for_becomes_a_demand() -> None:
    queue, order = LinkQueue(duplex=False, rate=1e9), []
    with queue.admit(QueuedCopy(Priority.DEMAND, MB)):
        thread, copy = start(queue, Priority.PREFETCH, order)
        queue.promote(copy, Priority.DEMAND)
        thread.join(10)
        assert order == ["DEMAND"]


@pytest.mark.usefixtures("patient")
def test_the_two_directions_of_a_duplex_link_do_not_wait_for_each_other() -> None:
    queue = LinkQueue(duplex=True, rate=1e9)
    with queue.admit(QueuedCopy(Priority.RESTORE, MB)), queue.admit(QueuedCopy(Priority.SPILL, MB)):
        running = {each.priority: each.running for each in queue.report().transfers}
    assert running == {"restore": 1, "demand": 0, "prefetch": 0, "spill": 1}


def test_nobody_waits_for_ever() -> None:
    queue = LinkQueue(duplex=False, rate=1e9)
    with queue.admit(QueuedCopy(Priority.RESTORE, MB)):
        started = time.monotonic()
        with queue.admit(QueuedCopy(Priority.SPILL, MB)):
            waited = time.monotonic() - started
    assert link_queue.MAX_WAIT_SECONDS <= waited < 10


def test_bytes_time_and_rates_are_counted() -> None:
    queue = LinkQueue(duplex=True, rate=1e3)
    queue.count(Priority.PREFETCH, 1500, 3)
    queue.count(Priority.PREFETCH, 500)
    with queue.admit(QueuedCopy(Priority.SPILL, MB)):
        time.sleep(0.01)
    with pytest.raises(RuntimeError), queue.admit(QueuedCopy(Priority.RESTORE, 10)):
        raise RuntimeError("a copy that failed leaves the link free")
    report = queue.report()
    found = {each.priority: each for each in report.transfers}
    assert (found["prefetch"].copies, found["prefetch"].bytes, found["prefetch"].seconds) == (4, 2000, 2.0)
    assert found["spill"].bytes == MB
    assert found["spill"].seconds >= 0.01
    assert report.rates is not None
    assert 1e3 < report.rates["to_host"] <= MB / 0.01
    assert report.rates["to_device"] == 1e3  # ten bytes are too few for a measurement
    assert all(each.running == each.waiting == 0 for each in report.transfers)


def test_the_busy_share_is_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LinkQueue(duplex=True, rate=1e6)
    monkeypatch.setattr(link_queue, "WINDOW", 0.05)
    time.sleep(0.06)
    queue.count(Priority.DEMAND, 10_000_000)  # ten seconds of transfer
    first, second = queue.report(), queue.report()
    assert first.busy == second.busy == {"to_device": 1.0, "to_host": 0.0}
    time.sleep(0.06)
    assert queue.report().busy == {"to_device": 0.0, "to_host": 0.0}


class Box:
    """The part of a tensor's interface that a copy needs."""

    def __init__(self, value: int) -> None:
        self.value, self.nbytes = value, 8

    def copy_(self, other: Box) -> None:
        self.value = other.value


def test_copies_into_one_place_end_in_the_order_they_were_started_in() -> None:
    """A stale prefetch does not overwrite a demanded copy that was started after it to the same place."""
    transfers, held = CpuTransfers(), threading.Event()

    def slow() -> Box:
        held.set()
        time.sleep(0.05)
        return Box(1)

    place, other = Box(0), Box(0)
    transfers.start(other, slow, Priority.PREFETCH)
    held.wait(10)
    transfers.start(place, Box(2), Priority.PREFETCH)  # abandoned
    transfers.wait(transfers.start(place, Box(3), Priority.DEMAND))
    assert (other.value, place.value) == (1, 3)
    transfers.close()
    assert place.value == 3
