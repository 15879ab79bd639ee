"""What every tier below the device has in common: tickets for work on its way, the threads that do it, the protocol.

One thread, the owner's (the engine's), calls a tier. Its workers move bytes and nothing else; what they did becomes
known to the tier's index when the owner's thread takes it in, by poll().
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
    """Return the 64-bit xxh3: it finds damage by disks, memory and half-finished writes, not forgery."""
    return xxhash.xxh3_64_intdigest(payload)


class CorruptRecordError(Exception):
    """What lies in the tier is not what was stored there."""


class Ticket(Generic[T]):
    """One piece of work on its way. Everything but the worker's side is called on the owner's thread.

    A worker that hangs leaves its ticket neither done nor cancelled; it is `expired`, and whoever waits should go on
    without it. A buffer given with the work is free again only once the ticket is done.
    """

    __slots__ = ("_begun", "_done", "_ended", "_lock", "_value", "_wake", "at", "deadline", "error", "seconds")

    def __init__(self, deadline: float, ended: Callable[["Ticket[Any]"], None] | None = None,
                 wake: Callable[[], None] | None = None) -> None:
        """Make a ticket. `ended` is told just before the ticket is done, `wake` just after."""
        self.deadline = deadline  # monotonic
        self.error: Exception | None = None
        self.seconds = 0.0  # a worker was busy with it
        self.at = 0.0  # monotonic, when it was done
        self._lock = threading.Lock()  # decides between begin() and cancel()
        self._begun = False
        self._value: T | None = None
        self._ended, self._wake = ended, wake
        self._done = False

    @classmethod
    def ended(cls, value: T | None, error: Exception | None = None) -> "Ticket[T]":
        """Return a ticket for work that needed no worker, or that was not even tried."""
        ticket: Ticket[T] = cls(time.monotonic())
        ticket._value, ticket.error, ticket._done, ticket.at = value, error, True, ticket.deadline
        return ticket

    def done(self) -> bool:
        """Return whether it has ended: with a value, a failure, or cancelled."""
        return self._done

    def expired(self, now: float) -> bool:
        """Return whether it is not done, and past its deadline."""
        return not self._done and now >= self.deadline

    def result(self) -> T | None:
        """Return the value once done; None if the work failed, was cancelled, or expired before. Never raises."""
        return self._value if self._done else None

    def cancel(self) -> None:
        """Have work that was not begun never begin: it is done at once. Work begun ends when it ends."""
        with self._lock:
            if self._begun or self._done:
                return
            self._begun = True  # so that no worker begins it
        self.end(None)

    # The worker's side

    def begin(self) -> bool:
        """Return whether the work is still wanted and in time; if not, it is done now and must not be touched."""
        with self._lock:
            if self._begun:
                return False
            self._begun = True
        if time.monotonic() >= self.deadline:
            self.end(None, TimeoutError("the deadline passed before the work began"))
            return False
        return True

    def end(self, value: T | None, error: Exception | None = None, seconds: float = 0.0) -> None:
        """End the ticket; called by whoever began it, exactly once."""
        self._value, self.error, self.seconds, self.at = value, error, seconds, time.monotonic()
        if self._ended is not None:
            self._ended(self)
        self._done = True  # whoever sees it sees the rest, and finds it where ended work is kept
        if self._wake is not None:
            self._wake()


@dataclass(slots=True)
class _Job:
    tickets: list[Ticket[Any]]
    work: Callable[[Sequence[int]], Sequence[Any]]  # takes the indices of the tickets still wanted
    deadline: float


class Lane:
    """Worker threads for one kind of work of one tier: first in, first out. Threads start when first needed."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None],
                 idle: tuple[float, Callable[[], None]] | None = None) -> None:
        """Make a lane. `idle`: (seconds, what a worker without work does that often); it may not raise."""
        self._name = name
        self._idle_work = idle
        self._max_threads = threads
        self._wake = wake
        self._state = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._running: dict[int, float] = {}  # thread -> deadline of its job
        self._ended: deque[Ticket[Any]] = deque()
        self._closed = False

    def submit(self, work: Callable[[], T], deadline: float) -> Ticket[T]:
        return self.submit_batch(lambda _: [work()], 1, deadline)[0]

    def submit_batch(
        self, work: Callable[[Sequence[int]], Sequence[T | Exception]], count: int, deadline: float
    ) -> list[Ticket[T]]:
        """Submit one job with `count` tickets. `work` takes the indices still wanted and gives one value for each.

        A value that is an Exception fails its ticket alone.
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
        """Return the tickets that ended since the last call, after ending those that waited past their deadline."""
        now = time.monotonic()
        with self._state:
            late = [job for job in self._queue if job.deadline <= now]
            if late:
                self._queue = deque(job for job in self._queue if job.deadline > now)
        for job in late:
            for ticket in job.tickets:
                ticket.begin()  # ends it: its deadline has passed
        ended = []
        for _ in range(len(self._ended)):
            ticket = self._ended.popleft()
            if ticket.done():
                ended.append(ticket)
            else:  # its worker is just ending it, and will wake us
                self._ended.append(ticket)
        return ended

    def stuck(self, now: float) -> bool:
        """Return whether every worker is held up by work past its deadline: what is submitted would wait in vain."""
        with self._state:
            return len(self._running) == self._max_threads and all(d <= now for d in self._running.values())

    def close(self, deadline: float) -> bool:
        """Let queued work end until the deadline, cancel the rest; False if a worker still hangs (it is left)."""
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
            del job  # its buffers are not held while this thread waits for the next

    @staticmethod
    def _do(job: _Job) -> None:
        wanted = [i for i, ticket in enumerate(job.tickets) if ticket.begin()]
        if not wanted:
            return
        start = time.perf_counter()
        try:
            values = job.work(wanted)
        except Exception as error:  # whatever it is, it ends this work and no other
            values = [error] * len(wanted)
        seconds = (time.perf_counter() - start) / len(wanted)
        for i, value in zip(wanted, values, strict=True):
            if isinstance(value, Exception):
                job.tickets[i].end(None, value, seconds)
            else:
                job.tickets[i].end(value, None, seconds)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened; a key that is not there counts neither as a load nor as a failure."""

    blocks: int = 0
    bytes: int = 0  # bytes of the blocks
    capacity_bytes: int | None = None  # None: not bounded by us
    stores: int = 0
    loads: int = 0
    load_failures: int = 0
    store_failures: int = 0
    evictions: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    seconds_writing: float = 0.0  # workers were busy; two at once count twice
    seconds_reading: float = 0.0
    available: bool = True


class Tier(Protocol):
    """A place for blocks below the device. Keys are opaque; every buffer has exactly the payload's bytes.

    Nothing here raises or waits because a disk or server is slow, full, broken or gone: tickets end False or None.
    """

    name: str  # "host", "pool", "disk" or "remote": what metrics and token sources call it

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        """Return which of these could be loaded now."""

    def has(self, key: bytes) -> bool | None:
        """Return whether the block is here, where that is known without asking anybody; None: lookup() has to ask."""

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        """Return one ticket a block. Buffers stay as they are until their ticket is done."""

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        """Load blocks, one ticket each. True: the buffer holds exactly the bytes stored; else it may hold anything."""

    def evict(self, count: int) -> Ticket[int]:
        """Drop the least recently used blocks; the value is how many."""

    def poll(self) -> None:
        """Take finished work into the index; lookup, store, load and evict do it too."""

    def clear(self) -> None:
        """Forget all blocks of this identity: none of them is found from now on, nor after a restart."""

    def stats(self) -> TierStats: ...

    def close(self, deadline: float) -> None:
        """End what is on its way, until the deadline (monotonic), and let go of files and connections."""


CopyOut = Callable[[Sequence[int], Sequence[memoryview]], None]  # device blocks to buffers; returns when they are there
CopyIn = Callable[[Sequence[memoryview], Sequence[int]], None]


@runtime_checkable
class MappedTier(Tier, Protocol):
    """A tier in memory that this process has mapped: a link copies between it and the device. Workers call the link."""

    def store_from(self, items: Sequence[tuple[bytes, int]], copy_out: CopyOut) -> list[Ticket[bool]]:
        """Store device blocks, one ticket each; they stay as they are until their ticket is done."""

    def load_to(self, items: Sequence[tuple[bytes, int]], copy_in: CopyIn) -> list[Ticket[bool]]:
        """Load to device blocks, one ticket each. True: the block holds exactly the bytes stored; else it may hold
        anything."""
