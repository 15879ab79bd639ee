"""The queue of copies over the link between a device and host memory, and statistics of these copies.

Every copy has a priority. A copy waits while one of a higher priority runs or waits, but for a limited time, so that no
copy starves. Copies that run in the order of a CUDA stream wait on the device instead
(memory.transfer.cuda_transfers); they are only counted here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

MAX_WAIT_SECONDS = 0.02  # maximum seconds that a copy waits for copies of a higher priority
MIN_MEASURED_BYTES = 1 << 20  # minimum bytes of a copy from which the link's rate is measured
WINDOW = 1.0  # minimum seconds over which the busy share of the link is measured


class Priority(IntEnum):
    """The purpose of a copy, most urgent first. All except SPILL copy to the device."""

    RESTORE = 0  # KV that a request waits for
    DEMAND = 1  # weights that the running step waits for
    PREFETCH = 2  # weights, or KV of a sequence longer than the pool, that a step will need
    SPILL = 3  # KV, or pages of managed memory, copied from the device

    @property
    def direction(self) -> str:
        return "to_host" if self is Priority.SPILL else "to_device"


@dataclass(frozen=True)
class TransferReport:
    """The statistics of one priority's copies since the start."""

    priority: str
    direction: str
    copies: int
    bytes: int
    seconds: float  # time on the link: measured, or estimated from the rate for copies in stream order
    waiting: int  # number of copies waiting now
    running: int  # number of copies running now that the host waits for


@dataclass(frozen=True)
class LinkReport:
    transfers: tuple[TransferReport, ...] = ()
    busy: dict[str, float] | None = None  # by direction: share of time the link was busy in about the last second
    rates: dict[str, float] | None = None  # by direction: bytes per second, assumed until measured


class QueuedCopy:
    """A copy that waits for the link or uses it; while it waits, its priority can be raised."""

    def __init__(self, priority: Priority, nbytes: int) -> None:
        self.priority = priority
        self.nbytes = nbytes


class LinkQueue:
    def __init__(self, duplex: bool, rate: float) -> None:
        """Create a queue. `duplex`: the directions do not slow each other; `rate`: bytes per second until measured."""
        self._duplex = duplex
        self._changed = threading.Condition()
        self._waiting: list[QueuedCopy] = []
        self._running: list[QueuedCopy] = []
        self._copies, self._bytes = dict.fromkeys(Priority, 0), dict.fromkeys(Priority, 0)
        self._seconds = dict.fromkeys(Priority, 0.0)
        self._rates = {"to_device": rate, "to_host": rate}
        self._window = (time.monotonic(), {"to_device": 0.0, "to_host": 0.0})  # window's start, seconds before
        self._busy = {"to_device": 0.0, "to_host": 0.0}

    @contextmanager
    def admit(self, copy: QueuedCopy) -> Iterator[None]:
        """Wait for the link, run the copy within the context, and count it; this blocks the calling thread."""
        with self._changed:
            self._waiting.append(copy)
            deadline = time.monotonic() + MAX_WAIT_SECONDS
            while self._is_behind(copy) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._waiting.remove(copy)
            self._running.append(copy)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            with self._changed:
                self._running.remove(copy)
                self._changed.notify_all()
                self._count(copy.priority, copy.nbytes, seconds)
                if copy.nbytes >= MIN_MEASURED_BYTES:
                    self._observe(copy.priority.direction, copy.nbytes / max(seconds, 1e-9))

    def promote(self, copy: QueuedCopy, priority: Priority) -> None:
        """Raise the priority of a copy that is now needed earlier."""
        with self._changed:
            copy.priority = min(copy.priority, priority)
            self._changed.notify_all()

    def count(self, priority: Priority, nbytes: int, copies: int = 1) -> None:
        """Count copies that run in stream order, with a duration estimated from the link's measured rate."""
        if nbytes:
            with self._changed:
                self._count(priority, nbytes, nbytes / self._rates[priority.direction], copies)

    def report(self) -> LinkReport:
        now = time.monotonic()
        with self._changed:
            since, before = self._window
            if now - since >= WINDOW:
                spent = {way: sum(self._seconds[each] for each in Priority if each.direction == way)
                         for way in self._busy}
                self._busy = {way: min(1.0, (spent[way] - before[way]) / (now - since)) for way in spent}
                self._window = (now, spent)
            transfers = tuple(
                TransferReport(each.name.lower(), each.direction, self._copies[each], self._bytes[each],
                               self._seconds[each], sum(copy.priority is each for copy in self._waiting),
                               sum(copy.priority is each for copy in self._running)) for each in Priority)
            return LinkReport(transfers, dict(self._busy), dict(self._rates))

    def _is_behind(self, copy: QueuedCopy) -> bool:
        return any(other.priority < copy.priority and (not self._duplex
                                                       or other.priority.direction == copy.priority.direction)
                   for other in (*self._waiting, *self._running))

    def _count(self, priority: Priority, nbytes: int, seconds: float, copies: int = 1) -> None:
        self._copies[priority] += copies
        self._bytes[priority] += nbytes
        self._seconds[priority] += seconds

    def _observe(self, direction: str, rate: float) -> None:
        """Update the rate: a higher one is adopted at once; a lower one, perhaps due to waiting, counts little."""
        known = self._rates[direction]
        self._rates[direction] = rate if rate > known else known + 0.05 * (rate - known)
