"""The common parts of all tiers below the device: tickets for submitted work, worker threads, and the protocol.

One thread, the owner's (the engine's), calls a tier. Workers only move bytes; the owner's thread applies the results
of their work to the tier's index in poll().
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import xxhash

T = TypeVar("T")


def checksum(payload: bytes | memoryview) -> int:
    """Return the 64-bit xxh3: it detects damage by disks, memory and incomplete writes, but not forgery."""
    return xxhash.xxh3_64_intdigest(payload)


class CorruptRecordError(Exception):
    """The bytes in the tier are not those that were stored."""


class Ticket(Generic[T]):
    """A handle of submitted work. Methods are called on the owner's thread, except for those of the worker.

    A worker that hangs leaves its ticket neither done nor cancelled; the ticket is `expired`, and callers should no
    longer wait for it. A buffer passed with the work may be reused only once the ticket is done.
    """

    __slots__ = ("_begun", "_done", "_ended", "_lock", "_value", "_wake", "at", "deadline", "error", "seconds")

    def __init__(self, deadline: float, ended: Callable[["Ticket[Any]"], None] | None = None,
                 wake: Callable[[], None] | None = None) -> None:
        """Create a ticket. `ended` is called just before the ticket is done, `wake` just after."""
        self.deadline = deadline  # monotonic time
        self.error: Exception | None = None
        self.seconds = 0.0  # time that a worker spent on it
        self.at = 0.0  # monotonic time at which it was done
        self._lock = threading.Lock()  # makes begin() and cancel() exclude each other
        self._begun = False
        self._value: T | None = None
        self._ended, self._wake = ended, wake
        self._done = False

    @classmethod
    def ended(cls, value: T | None, error: Exception | None = None) -> "Ticket[T]":
        """Return a ticket that is already done, for work that needed no worker or was not tried."""
        ticket: Ticket[T] = cls(time.monotonic())
        ticket._value, ticket.error, ticket._done, ticket.at = value, error, True, ticket.deadline
        return ticket

    def done(self) -> bool:
        """Return whether the work has completed, failed or been cancelled."""
        return self._done

    def expired(self, now: float) -> bool:
        """Return whether the ticket is not done, and past its deadline."""
        return not self._done and now >= self.deadline

    def result(self) -> T | None:
        """Return the value once done; None if the work failed, was cancelled, or expired before. Never raises."""
        return self._value if self._done else None

    def cancel(self) -> None:
        """Cancel work that no worker has begun, so that it is done at once. Work already begun continues."""
        with self._lock:
            if self._begun or self._done:
                return
            self._begun = True  # prevents workers from beginning it
        self.end(None)

    # Methods called by the worker

    def begin(self) -> bool:
        """Return whether to do the work; False if it was cancelled or is late, and then the ticket is done already."""
        with self._lock:
            if self._begun:
                return False
            self._begun = True
        if time.monotonic() >= self.deadline:
            self.end(None, TimeoutError("the deadline passed before the work began"))
            return False
        return True

    def end(self, value: T | None, error: Exception | None = None, seconds: float = 0.0) -> None:
        """Complete the ticket; called by the worker that began it, exactly once."""
        self._value, self.error, self.seconds, self.at = value, error, seconds, time.monotonic()
        if self._ended is not None:
            self._ended(self)
        self._done = True  # set last, so that readers see all other fields, and the ticket in the ended queue
        if self._wake is not None:
            self._wake()


@dataclass(slots=True)
class _Job:
    tickets: list[Ticket[Any]]
    work: Callable[[Sequence[int]], Sequence[Any]]  # called with the indices of tickets not cancelled
    deadline: float


class Lane:
    """Worker threads for one kind of work of one tier, first in, first out. Threads start when first needed."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None],
                 idle: tuple[float, Callable[[], None]] | None = None) -> None:
        """Create a lane. `idle`: (seconds, function that an idle worker calls at this interval); it must not raise."""
        self._name = name
        self._idle_work = idle
        self._max_threads = threads
        self._wake = wake
        self._state = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._running: dict[int, float] = {}  # thread id -> deadline of its job
        self._ended: deque[Ticket[Any]] = deque()
        self._closed = False

    def submit(self, work: Callable[[], T], deadline: float) -> Ticket[T]:
        return self.submit_batch(lambda _: [work()], 1, deadline)[0]

    def submit_batch(
        self, work: Callable[[Sequence[int]], Sequence[T | Exception]], count: int, deadline: float
    ) -> list[Ticket[T]]:
        """Submit one job with `count` tickets. `work` gets the indices not cancelled and returns one value for each.

        A value that is an Exception fails only its own ticket.
        """
        tickets: list[Ticket[T]] = [Ticket(deadline, self._ended.append, self._wake) for _ in range(count)]
        with self._state:
            if not self._closed:
                self._queue.append(_Job(list(tickets), work, deadline))
                if self._idle < len(self._queue) and len(self._threads) < self._max_threads:
                    thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                self._state.notify()
                return tickets
        for ticket in tickets:
            ticket.cancel()
        return tickets

    def drain(self) -> list[Ticket[Any]]:
        """Return the tickets done since the last call, including those that expired in the queue."""
        now = time.monotonic()
        with self._state:
            late = [job for job in self._queue if job.deadline <= now]
            if late:
                self._queue = deque(job for job in self._queue if job.deadline > now)
        for job in late:
            for ticket in job.tickets:
                ticket.begin()  # completes it with an error: its deadline has passed
        ended = []
        for _ in range(len(self._ended)):
            ticket = self._ended.popleft()
            if ticket.done():
                ended.append(ticket)
            else:  # its worker is about to set it done, and will call wake() then
                self._ended.append(ticket)
        return ended

    def stuck(self, now: float) -> bool:
        """Return whether every worker is stuck in work past its deadline, so that submitted work would not begin."""
        with self._state:
            return len(self._running) == self._max_threads and all(d <= now for d in self._running.values())

    def close(self, deadline: float) -> bool:
        """Run queued work until the deadline, then cancel the rest; False if a worker hangs, which is left running."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._state:
            left = [ticket for job in self._queue for ticket in job.tickets]
            self._queue.clear()
            self._state.notify_all()
        for ticket in left:
            ticket.cancel()
        for thread in self._threads:
            thread.join(max(0.05, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        me = threading.get_ident()
        while True:
            with self._state:
                self._running.pop(me, None)
                self._idle += 1
                timed_out = False
                while not self._queue and not self._closed and not timed_out:
                    timed_out = not self._state.wait(self._idle_work[0] if self._idle_work is not None else None)
                self._idle -= 1
                job = None
                if self._queue:
                    job = self._queue.popleft()
                    self._running[me] = job.deadline
                elif self._closed:
                    return
            if job is not None:
                self._do(job)
            elif self._idle_work is not None:
                self._idle_work[1]()
            del job  # its buffers must not stay referenced while this thread waits for the next job

    @staticmethod
    def _do(job: _Job) -> None:
        wanted = [i for i, ticket in enumerate(job.tickets) if ticket.begin()]
        if not wanted:
            return
        start = time.perf_counter()
        try:
            values = job.work(wanted)
        except Exception as error:  # any error fails this job only
            values = [error] * len(wanted)
        seconds = (time.perf_counter() - start) / len(wanted)
        for i, value in zip(wanted, values, strict=True):
            if isinstance(value, Exception):
                job.tickets[i].end(None, value, seconds)
            else:
                job.tickets[i].end(value, None, seconds)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened; a load of a missing key counts neither as a load nor as a failure."""

    blocks: int = 0
    bytes: int = 0  # total bytes of the blocks
    capacity_bytes: int | None = None  # maximum bytes; None if this package sets no limit
    stores: int = 0
    loads: int = 0
    load_failures: int = 0
    store_failures: int = 0
    evictions: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    seconds_writing: float = 0.0  # time that workers spent; two concurrent workers count twice
    seconds_reading: float = 0.0
    available: bool = True


class Tier(Protocol):
    """A tier of blocks below the device. Keys are opaque; every buffer has exactly the payload's size.

    No method raises or waits because a disk or server is slow, full, broken or gone: tickets end with False or None.
    """

    name: str  # "host", "pool", "disk" or "remote": the tier's name in metrics and token sources

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        """Return which of these blocks could be loaded now."""

    def has(self, key: bytes) -> bool | None:
        """Return whether the tier has the block, if that is known without a lookup(); otherwise None."""

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        """Store blocks, one ticket each. Buffers must not change until their ticket is done."""

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        """Load blocks, one ticket each. Only if it is True, the buffer has exactly the bytes that were stored."""

    def evict(self, count: int) -> Ticket[int]:
        """Drop up to `count` least recently used blocks; the ticket's value is the number dropped."""

    def poll(self) -> None:
        """Apply completed work to the index; lookup, store, load and evict do it too."""

    def clear(self) -> None:
        """Forget all blocks of this identity: none of them is found from now on, nor after a restart."""

    def stats(self) -> TierStats: ...

    def close(self, deadline: float) -> None:
        """Complete pending work until the deadline (monotonic), and close files and connections."""


CopyOut = Callable[[Sequence[int], Sequence[memoryview]], None]  # copies device blocks to buffers; returns when done
CopyIn = Callable[[Sequence[memoryview], Sequence[int]], None]


@runtime_checkable
class MappedTier(Tier, Protocol):
    """A tier in memory that this process has mapped: its workers call the link to copy to and from the device."""

    def store_from(self, items: Sequence[tuple[bytes, int]], copy_out: CopyOut) -> list[Ticket[bool]]:
        """Store device blocks, one ticket each; a block must not change until its ticket is done."""

    def load_to(self, items: Sequence[tuple[bytes, int]], copy_in: CopyIn) -> list[Ticket[bool]]:
        """Load to device blocks, one ticket each. Only if it is True, the block has exactly the bytes that were
        stored."""
