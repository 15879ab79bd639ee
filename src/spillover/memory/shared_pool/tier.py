"""Blocks in a shared pool: host memory of the machine, that its owner keeps for all engines.

An owner that is gone, stopped or full is a tier without blocks (see `tiers/served.py`). What is read is compared with
its checksum after it was copied.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spillover.kernels.huge_pages import address_of
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connection, Connections, PoolUnavailableError
from spillover.memory.shared_pool.index import THERE
from spillover.memory.tiers.base import CorruptRecordError, Ticket, TierStats, checksum
from spillover.memory.tiers.served import Items, ServedTier

TIMEOUT_SECONDS = 1.0
LOOKUP_SECONDS = 0.5
RETRY_SECONDS = 1.0
PROBE_SECONDS = 2.0  # without a look-up, after which the owner is asked whether it is there
BATCH_BYTES = 4 << 20  # for one worker at a time


class SharedPoolTier(ServedTier):
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
        super().__init__(f"shared pool at {path}", payload_bytes, wake, batch=max(1, BATCH_BYTES // payload_bytes),
                         seconds=TIMEOUT_SECONDS if timeout is None else timeout,
                         lookup_seconds=LOOKUP_SECONDS if lookup_timeout is None else lookup_timeout,
                         retry_seconds=retry_seconds, probe_seconds=probe_seconds, threads=threads, down=True)
        self._connections = Connections(path, identity, payload_bytes, description)
        self._probe_seconds = probe_seconds
        self._report: wire.Report | None = None
        self._report_at = 0.0  # when the next is wanted; only the worker of look-ups reads and writes it
        self._blocks_written = 0
        self._written: deque[int] = deque()  # from workers: blocks that the pool did not have
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

    def evict(self, count: int) -> Ticket[int]:
        self.poll()
        if count < 1 or not self._usable():
            return Ticket.ended(0)
        deadline = time.monotonic() + self._seconds

        def drop() -> int:
            with self._connections.use(deadline) as (connection, _):
                return connection.ask(wire.Evict(count), wire.Count, deadline).count

        return self._submit(self._writing, "evict", drop, deadline)

    def stats(self) -> TierStats:
        """Return statistics; blocks are those of all engines, as far as known, and the capacity is for all models."""
        self.poll()
        report = self._report
        blocks = sum(model.blocks for model in report.models) if report is not None else 0
        return replace(
            self._counters(),
            blocks=blocks,
            bytes=blocks * self.payload_bytes,
            capacity_bytes=report.capacity if report is not None else None,
            evictions=sum(model.evictions for model in report.models) if report is not None else 0,
            bytes_written=self._blocks_written * self.payload_bytes,
        )

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

    def _store(self, items: Items, deadline: float) -> list[bool | Exception]:
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

    def _load(self, items: Items, deadline: float) -> list[bool | Exception]:
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

    # What the answers mean

    def _answered(self, answer: wire.Report) -> None:
        self._report = answer

    def _count(self) -> None:
        while self._written:
            self._blocks_written += self._written.popleft()

    def _let_go(self) -> None:
        """Unmap the memory of an owner that died at once."""
        self._connections.drop_idle()

    def _disconnect(self) -> None:
        self._connections.close()


def _copy(to: memoryview, source: memoryview) -> None:
    """Copy; the interpreter is given to other threads meanwhile."""
    if source.readonly:  # has no address for ctypes
        to[:] = source
        return
    ctypes.memmove(address_of(to), address_of(source), source.nbytes)
