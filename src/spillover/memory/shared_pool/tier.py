"""The tier of a shared pool: host memory of the machine, which its owner keeps for all engines.

If the owner has ended, is stopped or is full, the tier acts as one without blocks (see `tiers/served.py`). Blocks are
copied directly between the device and the pool's mapped memory; the checksum of a loaded block is compared afterwards.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spillover.kernels.huge_pages import address_of
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connection, Connections, PoolMemory, PoolUnavailableError
from spillover.memory.shared_pool.index import PRESENT
from spillover.memory.tiers.base import CopyIn, CopyOut, CorruptRecordError, Ticket, TierStats, checksum
from spillover.memory.tiers.served import Items, ServedTier
from spillover.memory.transfer.host_pool import HostPool

TIMEOUT_SECONDS = 1.0
LOOKUP_SECONDS = 0.5
RETRY_SECONDS = 1.0
PROBE_SECONDS = 2.0  # seconds without a lookup after which the owner is probed
BATCH_BYTES = 4 << 20  # maximum bytes of one worker's request to and from host memory
DIRECT_BYTES = 16 << 20  # maximum bytes of one worker's request to and from the device

DeviceBlocks = Sequence[tuple[bytes, int]]  # keys and device blocks
_Copy = Callable[[Sequence[memoryview], Sequence[int]], None]  # copies between slots of the pool and items, by index


class CopyFailedError(Exception):
    """The link to the device failed, which does not mean that the pool did."""


def pool_threads() -> int:
    """Return the number of threads per direction of a pool's copies: a checksum takes longer than a GPU's copy."""
    return max(2, min(4, len(os.sched_getaffinity(0)) // 4))


class SharedPoolTier(ServedTier):
    """A tier in the memory of a pool's owner, shared by all engines of this machine with the same identity."""

    name = "pool"
    _harmless = (*ServedTier._harmless, CopyFailedError)

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
        host: HostPool | None = None,
    ) -> None:
        """Connect lazily, as an owner may start later. `threads`: workers in each direction. `host`: the host pool
        whose link copies between the device and the shared pool."""
        super().__init__(f"shared pool at {path}", payload_bytes, wake, batch=max(1, BATCH_BYTES // payload_bytes),
                         seconds=TIMEOUT_SECONDS if timeout is None else timeout,
                         lookup_seconds=LOOKUP_SECONDS if lookup_timeout is None else lookup_timeout,
                         retry_seconds=retry_seconds, probe_seconds=probe_seconds, threads=threads, down=True)
        self._connections = Connections(path, identity, payload_bytes, description, host)
        self._direct_batch = max(1, DIRECT_BYTES // payload_bytes)
        self._probe_seconds = probe_seconds
        self._report: wire.Report | None = None
        self._report_at = 0.0  # time of the next report; only the worker of lookups reads and writes it
        self._blocks_written = 0
        self._written: deque[int] = deque()  # from workers: number of written blocks per request
        first = self._submit_probe()  # the first prompt may be in the pool already, and a wrong path is logged
        give_up = time.monotonic() + self._seconds
        while not first.done() and time.monotonic() < give_up:
            time.sleep(0.001)
        self.poll()

    # Tier methods

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        self.poll()
        if not keys or not self._usable():
            return Ticket.ended([False] * len(keys))
        wanted, deadline = list(keys), time.monotonic() + self._lookup_seconds

        def ask() -> list[bool]:
            with self._connections.use(deadline) as (connection, _):
                found = connection.ask(wire.Find(wanted), wire.Found, deadline).there
                if time.monotonic() >= self._report_at:
                    self._probes.append(self._ask_report(connection, deadline))
                return found

        return self._submit(self._lookups, "lookup", ask, deadline)

    def store_from(self, items: DeviceBlocks, copy_out: CopyOut) -> list[Ticket[bool]]:
        def store(items: DeviceBlocks, deadline: float) -> list[bool | Exception]:
            return self._write([key for key, _ in items], lambda places, which: copy_out(
                [items[index][1] for index in which], places), deadline)

        return self._submit_batches("store", items, store, self._direct_batch)

    def load_to(self, items: DeviceBlocks, copy_in: CopyIn) -> list[Ticket[bool]]:
        def load(items: DeviceBlocks, deadline: float) -> list[bool | Exception]:
            return self._read([key for key, _ in items], lambda places, which: copy_in(
                places, [items[index][1] for index in which]), deadline)

        return self._submit_batches("load", items, load, self._direct_batch)

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
        """Return statistics; blocks are the latest known of all engines, and the capacity is for all models."""
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
        """Flip one bit of a stored payload, for tests of damage detection; False if there is no such block.

        It waits for the owner.
        """
        deadline = time.monotonic() + self._seconds
        with suppress(PoolUnavailableError), self._connections.use(deadline) as (connection, memory):
            (pinned,) = connection.ask(wire.Pin([key]), wire.Pinned, deadline).blocks
            if pinned is not None:
                memory.view(pinned[0], self.payload_bytes)[bit // 8 % self.payload_bytes] ^= 1 << bit % 8
                connection.ask(wire.Release([pinned[0]], []), wire.Count, deadline)
                return True
        return False

    # Methods called by workers

    def _store(self, items: Items, deadline: float) -> list[bool | Exception]:
        def copy(places: Sequence[memoryview], which: Sequence[int]) -> None:
            for place, index in zip(places, which, strict=True):
                _copy(place, items[index][1])

        return self._write([key for key, _ in items], copy, deadline)

    def _load(self, items: Items, deadline: float) -> list[bool | Exception]:
        def copy(places: Sequence[memoryview], which: Sequence[int]) -> None:
            for place, index in zip(places, which, strict=True):
                _copy(items[index][1], place)

        return self._read([key for key, _ in items], copy, deadline)

    def _write(self, keys: list[bytes], copy: _Copy, deadline: float) -> list[bool | Exception]:
        """Store blocks, whose bytes `copy` writes to the pool; return for each whether the pool has it now."""
        with self._connections.use(deadline) as (connection, memory):
            places = connection.ask(wire.Take(keys), wire.Places, deadline).places
            written = [(place, index) for index, place in enumerate(places) if place >= 0]
            checksums = self._copy_and_sum(memory, written, copy)
            published = iter(connection.ask(wire.Publish([place for place, _ in written], checksums),
                                            wire.Found, deadline).there if written else ())
            self._written.append(len(written))
            return [next(published) if place >= 0 else place == PRESENT for place in places]

    def _read(self, keys: list[bytes], copy: _Copy, deadline: float) -> list[bool | Exception]:
        """Load blocks, whose bytes `copy` reads from the pool; return for each whether its checksum matches."""
        with self._connections.use(deadline) as (connection, memory):
            pinned = connection.ask(wire.Pin(keys), wire.Pinned, deadline).blocks
            found = [(block[0], index) for index, block in enumerate(pinned) if block is not None]
            results: list[bool | Exception] = [False] * len(keys)
            for (_, index), summed in zip(found, self._copy_and_sum(memory, found, copy), strict=True):
                block = pinned[index]
                assert block is not None
                results[index] = summed == block[1] or CorruptRecordError("wrong checksum")
            damaged = [key for key, result in zip(keys, results, strict=True) if isinstance(result, Exception)]
            with suppress(PoolUnavailableError):  # the blocks have been loaded in any case
                if found:
                    connection.ask(wire.Release([place for place, _ in found], damaged), wire.Count, deadline)
            return results

    def _copy_and_sum(self, memory: PoolMemory, items: Sequence[tuple[int, int]], copy: _Copy) -> list[int]:
        """Call `copy` once per slab, as slabs are pinned separately, for its items (offset, index); return the items'
        checksums, which are computed after the copy, so that a change of a slot before or during it is detected."""
        views = [memory.view(place, self.payload_bytes) for place, _ in items]
        slabs: dict[int, list[int]] = {}
        for at, (place, _) in enumerate(items):
            slabs.setdefault(place // memory.slab_bytes, []).append(at)
        try:
            for chosen in slabs.values():
                copy([views[at] for at in chosen], [items[at][1] for at in chosen])
            return [checksum(view) for view in views]
        except Exception as error:
            raise CopyFailedError(str(error)) from None  # no cause: its frames would keep the memory mapped
        finally:
            for view in views:
                with suppress(BufferError):
                    view.release()

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

    # Results of requests

    def _on_probe_answer(self, answer: wire.Report) -> None:
        self._report = answer

    def _count(self) -> None:
        while self._written:
            self._blocks_written += self._written.popleft()

    def _release_idle(self) -> None:
        """Close idle connections, so that the memory of an owner that died is unmapped at once."""
        self._connections.drop_idle()

    def _disconnect(self) -> None:
        self._connections.close()


def _copy(to: memoryview, source: memoryview) -> None:
    """Copy bytes; the GIL is released unless the source is read-only."""
    if source.readonly:  # ctypes cannot get its address
        to[:] = source
        return
    ctypes.memmove(address_of(to), address_of(source), source.nbytes)
