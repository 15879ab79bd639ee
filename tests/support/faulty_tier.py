"""A tier that wraps another one and injects faults: the engine above it must still produce the same tokens.

Faults are drawn from a seed in the order of the calls, so a run can be repeated.

    slow      the result arrives late, but within the deadline
    fail      the operation fails; a load may have written garbage into the buffer
    corrupt   a bit of the stored record, which its checksum covers, is flipped in place before the record is loaded
    vanish    a block that lookup found is missing when it is loaded, until it is stored again
    hang      the operation completes well after its deadline; a load writes into its buffer just before it completes
"""

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Protocol, TypeVar, runtime_checkable

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import Ticket, Tier, TierStats, checksum

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FaultRates:
    """The share of blocks (and of lookups) that each fault affects; the remaining share, at least 0, succeeds."""

    slow: float = 0.0
    fail: float = 0.0
    corrupt: float = 0.0
    vanish: float = 0.0
    hang: float = 0.0


@runtime_checkable
class Damageable(Protocol):
    def damage(self, key: bytes, bit: int) -> bool:
        """Flip one bit of a stored payload in place; return False if the block does not exist."""


class FaultyTier:
    """`injected` counts the faults; `touched_too_early` counts buffers that changed before their store completed."""

    def __init__(
        self,
        inner: Tier,
        seed: int,
        rates: FaultRates,
        wake: Callable[[], None],
        *,
        slow_seconds: float = 0.02,
        hang_seconds: float = 0.2,
        deadline_seconds: float | None = None,
    ) -> None:
        """`slow_seconds`: longest delay; `hang_seconds`: how long after its deadline a hanging ticket completes.

        `deadline_seconds` shortens the deadlines of late tickets, so that a test need not wait for those of a disk.
        """
        if sum(getattr(rates, field.name) for field in fields(rates)) > 1:
            raise SpilloverError(f"the rates of faults add up to more than 1: {rates}")
        if rates.corrupt and not isinstance(inner, Damageable):
            raise SpilloverError(f"a {type(inner).__name__} keeps nothing whose bits could be flipped")
        self.name = inner.name
        self.inner = inner
        self.injected: Counter[str] = Counter()
        self.touched_too_early = 0
        self._rates = rates
        self._random = Random(seed)
        self._slow_seconds, self._hang_seconds = slow_seconds, hang_seconds
        self._deadline_seconds = deadline_seconds
        self._vanished: set[bytes] = set()
        self._failed_stores = self._failed_loads = 0
        self._later = _Later(wake)

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        fault, draw = self._draw()
        found = self.inner.lookup(keys)
        if fault == "fail":
            self.injected[fault] += 1
            return Ticket.ended(None, OSError("injected: the lookup failed"))
        if self._vanished and found.done() and (there := found.result()) is not None:
            found = Ticket.ended([yes and key not in self._vanished for key, yes in zip(keys, there, strict=True)])
        if fault in ("slow", "hang"):
            self.injected[fault] += 1
            return self._delay(found, fault, draw, lambda: None)
        return found

    def has(self, key: bytes) -> bool | None:
        return False if key in self._vanished else self.inner.has(key)

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [self._store(key, payload) for key, payload in items]

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [self._load(key, buffer) for key, buffer in items]

    def evict(self, count: int) -> Ticket[int]:
        return self.inner.evict(count)

    def poll(self) -> None:
        self.inner.poll()

    def clear(self) -> None:
        self._vanished.clear()
        self.inner.clear()

    def stats(self) -> TierStats:
        stats = self.inner.stats()
        return replace(
            stats,
            store_failures=stats.store_failures + self._failed_stores,
            load_failures=stats.load_failures + self._failed_loads,
        )

    def close(self, deadline: float) -> None:
        self.inner.close(deadline)
        self._later.close()

    def _draw(self) -> tuple[str | None, float]:
        """Draw the fault of the next operation, and a number for its details; always makes two draws."""
        choice, draw = self._random.random(), self._random.random()
        for field in fields(self._rates):
            choice -= getattr(self._rates, field.name)
            if choice < 0:
                return field.name, draw
        return None, draw

    def _store(self, key: bytes, payload: memoryview) -> Ticket[bool]:
        fault, draw = self._draw()
        if fault == "fail":
            self.injected[fault] += 1
            self._failed_stores += 1
            return Ticket.ended(None, OSError("injected: the store failed"))
        self._vanished.discard(key)
        ticket = self.inner.store([(key, payload)])[0]
        if fault not in ("slow", "hang"):
            return ticket
        self.injected[fault] += 1
        before = checksum(payload)

        def compare() -> None:
            self.touched_too_early += checksum(payload) != before

        return self._delay(ticket, fault, draw, compare)

    def _load(self, key: bytes, buffer: memoryview) -> Ticket[bool]:
        fault, draw = self._draw()
        if fault == "corrupt" and isinstance(self.inner, Damageable):
            self.injected[fault] += self.inner.damage(key, int(draw * buffer.nbytes * 8))
        elif fault == "vanish":
            self.injected[fault] += 1
            self._vanished.add(key)
        elif fault == "fail":
            self.injected[fault] += 1
            self._failed_loads += 1
            buffer[: int(draw * buffer.nbytes)] = b"\xa5" * int(draw * buffer.nbytes)
            return Ticket.ended(None, OSError("injected: the load failed"))
        if key in self._vanished:
            return Ticket.ended(False)
        if fault not in ("slow", "hang"):
            return self.inner.load([(key, buffer)])[0]
        self.injected[fault] += 1
        scratch = memoryview(bytearray(buffer.nbytes))

        def copy() -> None:
            buffer[:] = scratch

        return self._delay(self.inner.load([(key, scratch)])[0], fault, draw, copy)

    def _delay(self, ticket: Ticket[T], fault: str, draw: float, last: Callable[[], None]) -> Ticket[T]:
        """Return a ticket that completes with the same result, but later; `last` runs just before."""
        now = time.monotonic()
        deadline = ticket.deadline if not ticket.done() else now + 1.0
        if self._deadline_seconds is not None:
            deadline = min(deadline, now + self._deadline_seconds)
        late: Ticket[T] = Ticket(deadline)
        late.begin()
        due = deadline + self._hang_seconds if fault == "hang" else min(now + draw * self._slow_seconds, deadline)
        self._later.put(due, ticket, late, last)
        return late


class _Later:
    """One thread that completes tickets when they are due."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._state = threading.Condition()
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Ticket[Any], Ticket[Any], Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, due: float, ticket: Ticket[Any], late: Ticket[Any], last: Callable[[], None]) -> None:
        with self._state:
            heapq.heappush(self._heap, (due, next(self._order), ticket, late, last))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
                self._thread.start()
            self._state.notify()

    def close(self) -> None:
        """Complete all late tickets at once, as cancelled: their buffers remain untouched."""
        with self._state:
            self._closed = True
            self._state.notify()
        if self._thread is not None:
            self._thread.join()
        for _, _, _, late, _ in self._heap:
            late.end(None)

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._closed and not (self._heap and self._heap[0][0] <= time.monotonic()):
                    self._state.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if self._closed:
                    return
                _, order, ticket, late, last = heapq.heappop(self._heap)
                if not ticket.done():
                    heapq.heappush(self._heap, (time.monotonic() + 0.001, order, ticket, late, last))
                    continue
            last()
            late.end(ticket.result(), ticket.error)
            self._wake()
