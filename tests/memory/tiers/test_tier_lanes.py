"""Tickets and lanes: work completes once, in order, with or without success; no call waits for a hanging worker."""

import threading
import time
from collections import deque

import pytest

from spillover.memory.tiers.base import Lane, Ticket
from support.tier_calls import no_wake, wait


@pytest.fixture
def gate():
    """Yield an event that hanging work waits for; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_work_is_done_in_order_and_wakes_the_owner() -> None:
    woken = threading.Event()
    lane = Lane("test", 1, woken.set)
    order: list[int] = []
    tickets = [lane.submit(lambda i=i: order.append(i) or i, soon()) for i in range(50)]
    assert wait(None, tickets) == list(range(50)) == order
    assert woken.is_set()
    assert len(lane.drain()) == 50
    assert lane.drain() == []
    assert lane.close(soon())


def test_what_is_done_is_drained_at_once() -> None:
    """Completed work is drained at once, however long the worker takes to finish after completing a ticket."""

    class Slow(deque[Ticket[int]]):
        def append(self, ticket: Ticket[int]) -> None:
            time.sleep(0.05)
            super().append(ticket)
            time.sleep(0.05)

    lane = Lane("test", 2, no_wake)
    lane._ended = Slow()
    for number in range(3):
        ticket = lane.submit(lambda number=number: number, soon())
        while not ticket.done():
            time.sleep(0.0005)
        assert lane.drain() == [ticket]
    assert lane.close(soon())


def test_several_threads_work_at_once() -> None:
    lane = Lane("test", 3, no_wake)
    together = threading.Barrier(3)
    assert len(set(wait(None, [lane.submit(lambda: together.wait(10), soon()) for _ in range(3)]))) == 3
    assert lane.close(soon())


def test_failure_is_a_result_and_never_raised() -> None:
    lane = Lane("test", 1, no_wake)
    failing = lane.submit(lambda: 1 // 0, soon())
    fine = lane.submit(lambda: 7, soon())
    assert wait(None, [failing, fine]) == [None, 7]
    assert isinstance(failing.error, ZeroDivisionError)
    assert fine.error is None
    assert lane.close(soon())


def test_one_of_a_batch_may_fail_alone_and_one_may_be_cancelled(gate: threading.Event) -> None:
    lane = Lane("test", 1, no_wake)
    lane.submit(gate.wait, soon())
    seen: list[int] = []

    def work(wanted):
        seen.extend(wanted)
        return [ValueError("bad") if i == 1 else i * 10 for i in wanted]

    tickets = lane.submit_batch(work, 4, soon())
    tickets[2].cancel()
    assert tickets[2].done()
    gate.set()
    assert wait(None, tickets) == [0, None, None, 30]
    assert seen == [0, 1, 3]
    assert isinstance(tickets[1].error, ValueError)
    assert tickets[2].error is None
    assert lane.close(soon())


def test_cancelled_work_never_begins_but_begun_work_ends_by_itself(gate: threading.Event) -> None:
    lane = Lane("test", 1, no_wake)
    begun = threading.Event()
    running = lane.submit(lambda: begun.set() or gate.wait(30), soon())
    queued = lane.submit(lambda: pytest.fail("must not begin"), soon())
    assert begun.wait(10)
    running.cancel()
    queued.cancel()
    assert queued.done()
    assert queued.result() is None
    assert not running.done(), "its buffer is still in use"
    gate.set()
    assert wait(None, [running]) == [True]
    assert lane.close(soon())


def test_hanging_worker_leaves_its_ticket_expired_and_the_queue_is_given_up(gate: threading.Event) -> None:
    lane = Lane("test", 1, no_wake)
    hanging = lane.submit(lambda: gate.wait(60), soon(0.05))
    queued = lane.submit(lambda: pytest.fail("must not begin"), soon(0.05))
    patient = lane.submit(lambda: "done", soon(60))
    time.sleep(0.1)
    assert hanging.expired(time.monotonic())
    assert not hanging.done()
    assert hanging.result() is None
    assert lane.drain() == [queued]
    assert queued.done()
    assert isinstance(queued.error, TimeoutError)
    assert not queued.expired(time.monotonic()), "done is not expired"
    assert lane.stuck(time.monotonic())
    gate.set()
    assert wait(None, [hanging, patient]) == [True, "done"]
    assert not lane.stuck(time.monotonic())
    assert lane.close(soon())


def test_work_past_its_deadline_does_not_begin() -> None:
    lane = Lane("test", 1, no_wake)
    ticket = lane.submit(lambda: pytest.fail("must not begin"), time.monotonic() - 1)
    assert wait(None, [ticket]) == [None]
    assert isinstance(ticket.error, TimeoutError)
    assert lane.close(soon())


def test_close_lets_queued_work_end_and_takes_no_more() -> None:
    lane = Lane("test", 1, no_wake)
    tickets = [lane.submit(lambda i=i: time.sleep(0.01) or i, soon()) for i in range(5)]
    assert lane.close(soon())
    assert [ticket.result() for ticket in tickets] == list(range(5))
    late = lane.submit(lambda: pytest.fail("must not begin"), soon())
    assert late.done()
    assert late.result() is None


def test_close_does_not_wait_for_a_worker_that_hangs(gate: threading.Event) -> None:
    lane = Lane("test", 2, no_wake)
    hanging = [lane.submit(lambda: gate.wait(60), soon()) for _ in range(2)]
    queued = lane.submit(lambda: pytest.fail("must not begin"), soon())
    start = time.monotonic()
    assert not lane.close(time.monotonic() + 0.1)
    assert time.monotonic() - start < 5
    assert queued.done()
    assert not any(ticket.done() for ticket in hanging)


def test_threads_cancelling_and_working_agree() -> None:
    """Each ticket completes exactly once, however cancelling and working threads race."""
    ended: list[Ticket] = []
    lane = Lane("test", 2, no_wake)
    ran: list[int] = []
    tickets = [lane.submit(lambda i=i: ran.append(i) or True, soon()) for i in range(2000)]
    for ticket in tickets[::2]:
        ticket.cancel()
    wait(None, tickets)
    assert lane.close(soon())
    ended = lane.drain()
    assert len(ended) == len(set(map(id, ended))) == 2000
    assert len(ran) == len(set(ran)) == sum(ticket.result() is True for ticket in tickets)
    assert set(range(1, 2000, 2)) <= set(ran)
