"""The base class of tiers whose blocks another process keeps: requests, failure detection, probing, clear and close.

After the first failure nothing waits for the server; it is probed from time to time until it is back. Subclasses
define the requests to a server and the meaning of its answers.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from spillover.memory.tiers.base import CorruptRecordError, Lane, Ticket, TierStats
from spillover.memory.tiers.health import Health

Items = Sequence[tuple[bytes, memoryview]]
T = TypeVar("T")


class ServedTier:
    """A tier in another process. Methods are called on the owner's thread unless they are marked for workers."""

    name: str
    _harmless: ClassVar[tuple[type[Exception], ...]] = (CorruptRecordError, TimeoutError)  # the server is up

    def __init__(
        self,
        shown: str,
        payload_bytes: int,
        wake: Callable[[], None],
        *,
        batch: int,
        seconds: float,
        lookup_seconds: float,
        retry_seconds: float,
        probe_seconds: float,
        threads: int,
        down: bool,
    ) -> None:
        """Start without a request. `shown`: name of the tier in logs; `batch`: maximum number of blocks in one request;
        `down`: treat the server as down until it has answered once."""
        self.payload_bytes = payload_bytes
        self._batch = batch
        self._seconds = seconds
        self._lookup_seconds = lookup_seconds
        self._retry_seconds = retry_seconds
        self._lookups = Lane(f"{self.name}-lookup", 1, wake, (probe_seconds, self._probe_idle))
        self._reading = Lane(f"{self.name}-read", threads, wake)
        self._writing = Lane(f"{self.name}-write", threads, wake)
        self._work: dict[Ticket[Any], str] = {}  # pending ticket -> kind of request
        self._probes: deque[Any] = deque(maxlen=1)  # from workers: the server's last answer to a probe, or an Exception
        self._health = Health(shown)
        self._down = down
        self._down_until = math.inf if down else 0.0  # no probe before this time while _down
        self._clear_wanted = False
        self._open = True
        self._stores = self._loads = self._store_failures = self._load_failures = 0
        self._seconds_writing = self._seconds_reading = 0.0

    # Tier methods

    def has(self, key: bytes) -> None:
        """Return None: finding out takes a request to the server."""

    def store(self, items: Items) -> list[Ticket[bool]]:
        self._check(items)
        return self._submit_batches("store", items, self._store, self._batch)

    def load(self, items: Items) -> list[Ticket[bool]]:
        self._check(items)
        return self._submit_batches("load", items, self._load, self._batch)

    def poll(self) -> None:
        for lane in (self._lookups, self._reading, self._writing):
            for ticket in lane.drain():
                self._end(self._work.pop(ticket), ticket)
            if self._open and lane.stuck(time.monotonic()):
                self._abort_stuck_requests()
        self._count()
        waiting = self._work.values()
        if self._probes and "probe" not in waiting:
            self._take_probe(self._probes.popleft())
        if self._open and self._down and time.monotonic() >= self._down_until and "probe" not in waiting:
            self._submit_probe()
        if self._open and self._clear_wanted and not self._down and not {"store", "clear"} & set(waiting):
            self._submit(self._writing, "clear", self._forget, math.inf)

    def clear(self) -> None:
        """Forget all blocks: the tier has none until the server has dropped them, which is retried until it has."""
        self._clear_wanted = True
        for ticket, kind in list(self._work.items()):
            if kind == "store":
                ticket.cancel()
        self.poll()

    def close(self, deadline: float) -> None:
        if not self._open:
            return
        for ticket, kind in list(self._work.items()):
            if kind not in ("store", "clear"):
                ticket.cancel()
        while self._clear_wanted and not self._down and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.001)
        self._open = False
        if not self._writing.close(deadline):
            self._disconnect()
        for lane in (self._writing, self._reading, self._lookups):
            lane.close(min(deadline, time.monotonic() + 0.1))
        self.poll()
        self._disconnect()

    # Requests that a subclass defines, called by workers

    @abstractmethod
    def _store(self, items: Items, deadline: float) -> list[bool | Exception]:
        """Store blocks and return for each whether the server has it now."""

    @abstractmethod
    def _load(self, items: Items, deadline: float) -> list[bool | Exception]:
        """Load blocks and return for each whether its buffer has the stored bytes."""

    @abstractmethod
    def _forget(self) -> bool:
        """Make the server drop all blocks of this identity."""

    @abstractmethod
    def _probe(self) -> Any:
        """Return the server's answer to a probe; raise if there is none."""

    # Other methods that subclasses define or override

    @abstractmethod
    def _disconnect(self) -> None:
        """Close all connections; one in use may stay open until its request ends."""

    def _release_idle(self) -> None:
        """Release resources kept for a server that may be down; called by workers too."""

    def _abort_stuck_requests(self) -> None:
        """Free workers that hang past their deadline, if requests do not time out by themselves."""

    def _on_probe_answer(self, answer: Any) -> None:
        """Process the answer to a probe."""

    def _ended(self, kind: str, result: Any, error: Exception | None) -> None:
        """Process the result of a request other than a probe."""

    def _count(self) -> None:
        """Process the counts collected by workers."""

    def _error_text(self, error: Exception) -> str:
        """Return an error's text without secrets, for logs."""
        return str(error)

    def _accepts_blocks(self) -> bool:
        return self._usable()

    # Shared implementation

    def _usable(self) -> bool:
        return self._open and not self._down and not self._clear_wanted

    def _counters(self) -> TierStats:
        """Return statistics of this engine's own requests."""
        return TierStats(
            stores=self._stores,
            loads=self._loads,
            load_failures=self._load_failures,
            store_failures=self._store_failures,
            bytes_written=self._stores * self.payload_bytes,
            bytes_read=self._loads * self.payload_bytes,
            seconds_writing=self._seconds_writing,
            seconds_reading=self._seconds_reading,
            available=self._usable(),
        )

    def _check(self, items: Items) -> None:
        assert all(payload.nbytes == self.payload_bytes for _, payload in items), "a payload of another size"

    def _submit(self, lane: Lane, kind: str, work: Callable[[], Any], deadline: float) -> Ticket[Any]:
        ticket = lane.submit(work, deadline)
        self._work[ticket] = kind
        return ticket

    def _submit_probe(self) -> Ticket[Any]:
        return self._submit(self._lookups, "probe", self._probe, time.monotonic() + self._seconds)

    def _submit_batches(self, kind: Literal["store", "load"], items: Sequence[T],
                        do: Callable[[Sequence[T], float], list[bool | Exception]], most: int) -> list[Ticket[bool]]:
        """Submit requests of at most `most` items each, and return one ticket per item; if the server cannot be used,
        the tickets are already done."""
        self.poll()
        storing = kind == "store"
        if not (self._accepts_blocks() if storing else self._usable()):
            self._store_failures += len(items) if storing else 0
            return [Ticket.ended(False) for _ in items]
        lane = self._writing if storing else self._reading
        tickets: list[Ticket[bool]] = []
        deadline = time.monotonic() + self._seconds
        for start in range(0, len(items), most):
            part = items[start : start + most]

            def work(wanted: Sequence[int], part: Sequence[T] = part) -> list[bool | Exception]:
                return do([part[i] for i in wanted], deadline)

            batch = lane.submit_batch(work, len(part), deadline)
            self._work.update(dict.fromkeys(batch, kind))
            tickets.extend(batch)
        return tickets

    def _end(self, kind: str, ticket: Ticket[Any]) -> None:
        result, error = ticket.result(), ticket.error
        if kind == "probe":
            answer = error or TimeoutError("no answer within the deadline") if result is None else result
            if self._down or not isinstance(answer, TimeoutError):  # a probe that never began does not mean a failure
                self._take_probe(answer)
            return
        if kind == "store":
            self._seconds_writing += ticket.seconds
            self._stores += result is True
            self._store_failures += result is False or error is not None
        elif kind == "load":
            self._seconds_reading += ticket.seconds
            self._loads += result is True
            self._load_failures += error is not None
        elif kind == "clear" and result:
            self._clear_wanted = False
        self._ended(kind, result, error)
        if error is not None and not isinstance(error, self._harmless):
            self._fail(self._error_text(error))

    def _probe_idle(self) -> None:
        """Probe the server on an idle worker; poll() processes the answer."""
        try:
            self._probes.append(self._probe())
        except Exception as error:
            self._release_idle()  # at once: the next poll() may be much later
            self._probes.append(error)

    def _take_probe(self, answer: Any) -> None:
        if isinstance(answer, Exception):
            self._fail(self._error_text(answer))
        else:
            self._on_probe_answer(answer)
            self._down = False
            self._health.succeeded()

    def _fail(self, error: str) -> None:
        self._health.failed(error)
        self._release_idle()
        self._down = True
        self._down_until = time.monotonic() + self._retry_seconds
