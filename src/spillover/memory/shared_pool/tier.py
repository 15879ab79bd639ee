"""Blocks in a shared pool: host memory of the machine, that its owner keeps for all engines.

An owner that is gone, stopped or full is a tier without blocks: after the first failure nothing waits for it, and it is
asked now and then whether it is back. What is read is compared with its checksum after it was copied.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spillover.kernels.huge_pages import address_of
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connection, Connections, PoolUnavailableError
from spillover.memory.shared_pool.index import THERE
from spillover.memory.tiers.base import CorruptRecordError, Lane, Ticket, TierStats, checksum
from spillover.memory.tiers.health import Health

TIMEOUT_SECONDS = 1.0
LOOKUP_SECONDS = 0.5
RETRY_SECONDS = 1.0
PROBE_SECONDS = 2.0  # without a look-up, after which the owner is asked whether it is there
BATCH_BYTES = 4 << 20  # for one worker at a time


class SharedPoolTier:
    """A tier in the memory of a pool's owner, shared by all engines of this machine that have the same identity."""

    name = "pool"

    def __init__(
        self,
        path: Path,
        payload_bytes: int,
        identity: bytes,
        description: Mapping[str, str],
        wake: Callable[[], None],
        *,
        timeout: float | None = None,
        lookup_timeout: float | None = None,
        retry_seconds: float = RETRY_SECONDS,
        probe_seconds: float = PROBE_SECONDS,
        threads: int = 2,
    ) -> None:
        """Connect lazily: an owner may come later. `threads` work in each direction."""
        self.payload_bytes = payload_bytes
        self._connections = Connections(path, identity, payload_bytes, description)
        self._batch = max(1, BATCH_BYTES // payload_bytes)
        self._seconds = TIMEOUT_SECONDS if timeout is None else timeout
        self._lookup_seconds = LOOKUP_SECONDS if lookup_timeout is None else lookup_timeout
        self._retry_seconds = retry_seconds
        self._probe_seconds = probe_seconds
        self._lookups = Lane("pool-lookup", 1, wake, (probe_seconds, self._probe_idle))
        self._reading = Lane("pool-read", threads, wake)
        self._writing = Lane("pool-write", threads, wake)
        self._work: dict[Ticket[Any], str] = {}
        self._probes: deque[wire.Report | Exception] = deque(maxlen=1)  # from an idle worker
        self._health = Health(f"shared pool at {path}")
        self._report: wire.Report | None = None
        self._report_at = 0.0  # when the next is wanted; only the worker of look-ups reads and writes it
        self._down = True  # until the owner has answered once
        self._down_until = math.inf  # the owner is not asked before; meaningful while _down
        self._clear_wanted = False
        self._open = True
        self._stores = self._loads = self._store_failures = self._load_failures = 0
        self._blocks_written = 0
        self._written: deque[int] = deque()  # from workers: blocks that the pool did not have
        self._seconds_writing = self._seconds_reading = 0.0
        first = self._submit_probe()  # the first prompt may be in the pool already, and the log hears of a wrong path
        give_up = time.monotonic() + self._seconds
        while not first.done() and time.monotonic() < give_up:
            time.sleep(0.001)
        self.poll()

    # The tier

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        self.poll()
        if not keys or not self._usable():
            return Ticket.ended([False] * len(keys))
        asked, deadline = list(keys), time.monotonic() + self._lookup_seconds

        def ask() -> list[bool]:
            with self._connections.use(deadline) as (connection, _):
                there = connection.ask(wire.Find(asked), wire.Found, deadline).there
                if time.monotonic() >= self._report_at:
                    self._probes.append(self._ask_report(connection, deadline))
                return there

        return self._submit(self._lookups, "lookup", ask, deadline)

    def has(self, key: bytes) -> None:
        """Return None: only the owner knows."""

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self.poll()
        if not self._usable():
            self._store_failures += len(items)
            return [Ticket.ended(False) for _ in items]
        return self._submit_batches(self._writing, "store", items, self._store)

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self.poll()
        if not self._usable():
            return [Ticket.ended(False) for _ in items]
        return self._submit_batches(self._reading, "load", items, self._load)

    def evict(self, count: int) -> Ticket[int]:
        self.poll()
        if count < 1 or not self._usable():
            return Ticket.ended(0)
        deadline = time.monotonic() + self._seconds

        def drop() -> int:
            with self._connections.use(deadline) as (connection, _):
                return connection.ask(wire.Evict(count), wire.Count, deadline).count

        return self._submit(self._writing, "evict", drop, deadline)

    def poll(self) -> None:
        for lane in (self._lookups, self._reading, self._writing):
            for ticket in lane.drain():
                self._end(self._work.pop(ticket), ticket)
        while self._written:
            self._blocks_written += self._written.popleft()
        waiting = self._work.values()
        if self._probes and "probe" not in waiting:
            self._take_probe(self._probes.popleft())
        if self._open and self._down and time.monotonic() >= self._down_until and "probe" not in waiting:
            self._submit_probe()
        if self._open and self._clear_wanted and not self._down and not {"store", "clear"} & set(waiting):
            self._submit(self._writing, "clear", self._forget, math.inf)

    def clear(self) -> None:
        """Forget all blocks: this tier has none until the owner, asked again and again, has forgotten them."""
        self._clear_wanted = True
        for ticket, kind in list(self._work.items()):
            if kind == "store":
                ticket.cancel()
        self.poll()

    def stats(self) -> TierStats:
        """Return statistics; blocks are those of all engines, as far as known, and the capacity is for all models."""
        self.poll()
        report = self._report
        blocks = sum(model.blocks for model in report.models) if report is not None else 0
        return TierStats(
            blocks=blocks,
            bytes=blocks * self.payload_bytes,
            capacity_bytes=report.capacity if report is not None else None,
            stores=self._stores,
            loads=self._loads,
            load_failures=self._load_failures,
            store_failures=self._store_failures,
            evictions=sum(model.evictions for model in report.models) if report is not None else 0,
            bytes_written=self._blocks_written * self.payload_bytes,
            bytes_read=self._loads * self.payload_bytes,
            seconds_writing=self._seconds_writing,
            seconds_reading=self._seconds_reading,
            available=self._usable(),
        )

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
        self._writing.close(deadline)
        for lane in (self._reading, self._lookups):
            lane.close(min(deadline, time.monotonic() + 0.1))
        self.poll()
        self._connections.close()

    def damage(self, key: bytes, bit: int) -> bool:
        """Flip one bit of a stored payload where it lies, for tests of what notices; False if there is no such block.

        Waits for the owner.
        """
        deadline = time.monotonic() + self._seconds
        with suppress(PoolUnavailableError), self._connections.use(deadline) as (connection, memory):
            (pinned,) = connection.ask(wire.Pin([key]), wire.Pinned, deadline).blocks
            if pinned is not None:
                memory.view(pinned[0], self.payload_bytes)[bit // 8 % self.payload_bytes] ^= 1 << bit % 8
                connection.ask(wire.Release([pinned[0]], []), wire.Count, deadline)
                return True
        return False

    # The workers' side

    def _store(self, items: Sequence[tuple[bytes, memoryview]], deadline: float) -> list[bool | Exception]:
        with self._connections.use(deadline) as (connection, memory):
            places = connection.ask(wire.Take([key for key, _ in items]), wire.Places, deadline).places
            written = [(place, payload) for (_, payload), place in zip(items, places, strict=True) if place >= 0]
            for place, payload in written:
                _copy(memory.view(place, self.payload_bytes), payload)
            published = iter(connection.ask(wire.Publish([place for place, _ in written],
                                                         [checksum(payload) for _, payload in written]),
                                            wire.Found, deadline).there if written else ())
            self._written.append(len(written))
            return [next(published) if place >= 0 else place == THERE for place in places]

    def _load(self, items: Sequence[tuple[bytes, memoryview]], deadline: float) -> list[bool | Exception]:
        with self._connections.use(deadline) as (connection, memory):
            pinned = connection.ask(wire.Pin([key for key, _ in items]), wire.Pinned, deadline).blocks
            results: list[bool | Exception] = []
            for (_, buffer), block in zip(items, pinned, strict=True):
                if block is None:
                    results.append(False)
                    continue
                _copy(buffer, memory.view(block[0], self.payload_bytes))
                # Of the copy: whatever happens to the slot now, these bytes are the block's or are not used.
                results.append(checksum(buffer) == block[1] or CorruptRecordError("wrong checksum"))
            damaged = [key for (key, _), result in zip(items, results, strict=True) if isinstance(result, Exception)]
            places = [block[0] for block in pinned if block is not None]
            with suppress(PoolUnavailableError):  # the blocks are here all the same
                if places:
                    connection.ask(wire.Release(places, damaged), wire.Count, deadline)
            return results

    def _forget(self) -> bool:
        deadline = time.monotonic() + self._seconds
        with self._connections.use(deadline) as (connection, _):
            connection.ask(wire.Clear(), wire.Count, deadline)
        return True

    def _probe(self) -> wire.Report:
        deadline = time.monotonic() + self._lookup_seconds
        with self._connections.use(deadline) as (connection, _):
            return self._ask_report(connection, deadline)

    def _ask_report(self, connection: Connection, deadline: float) -> wire.Report:
        self._report_at = time.monotonic() + self._probe_seconds
        return connection.ask(wire.Ask(), wire.Report, deadline)

    def _probe_idle(self) -> None:
        """Probe the owner, by a worker that nobody has asked for a while; poll() takes it in."""
        try:
            self._probes.append(self._probe())
        except Exception as error:
            self._connections.drop_idle()  # so that the memory of an owner that died is given back at once
            self._probes.append(error)

    # The owner's side

    def _usable(self) -> bool:
        return self._open and not self._down and not self._clear_wanted

    def _submit(self, lane: Lane, kind: str, work: Callable[[], Any], deadline: float) -> Ticket[Any]:
        ticket = lane.submit(work, deadline)
        self._work[ticket] = kind
        return ticket

    def _submit_probe(self) -> Ticket[Any]:
        return self._submit(self._lookups, "probe", self._probe, time.monotonic() + self._seconds)

    def _submit_batches(
        self,
        lane: Lane,
        kind: str,
        items: Sequence[tuple[bytes, memoryview]],
        do: Callable[[Sequence[tuple[bytes, memoryview]], float], list[bool | Exception]],
    ) -> list[Ticket[bool]]:
        tickets: list[Ticket[bool]] = []
        deadline = time.monotonic() + self._seconds
        for start in range(0, len(items), self._batch):
            part = items[start : start + self._batch]
            assert all(payload.nbytes == self.payload_bytes for _, payload in part), "a payload of another size"

            def work(wanted: Sequence[int], part: Sequence[tuple[bytes, memoryview]] = part) -> list[bool | Exception]:
                return do([part[i] for i in wanted], deadline)

            batch = lane.submit_batch(work, len(part), deadline)
            self._work.update(dict.fromkeys(batch, kind))
            tickets.extend(batch)
        return tickets

    def _end(self, kind: str, ticket: Ticket[Any]) -> None:
        result, error = ticket.result(), ticket.error
        if kind == "store":
            self._seconds_writing += ticket.seconds
            self._stores += result is True
            self._store_failures += result is not True
        elif kind == "load":
            self._seconds_reading += ticket.seconds
            self._loads += result is True
            self._load_failures += error is not None
        elif kind == "clear" and result:
            self._clear_wanted = False
        elif kind == "probe":
            self._take_probe(error or result or TimeoutError("no answer within the deadline"))
            return
        if error is not None and not isinstance(error, CorruptRecordError | TimeoutError):
            self._fail(str(error))

    def _take_probe(self, answer: wire.Report | Exception) -> None:
        if isinstance(answer, Exception):
            self._fail(str(answer))
        else:
            self._report = answer
            self._down = False
            self._health.succeeded()

    def _fail(self, error: str) -> None:
        self._health.failed(error)
        self._connections.drop_idle()
        self._down = True
        self._down_until = time.monotonic() + self._retry_seconds


def _copy(to: memoryview, source: memoryview) -> None:
    """Copy; the interpreter is given to other threads meanwhile."""
    if source.readonly:  # has no address for ctypes
        to[:] = source
        return
    ctypes.memmove(address_of(to), address_of(source), source.nbytes)
