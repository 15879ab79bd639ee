"""A link for the simulated runner, and a tier in memory: moved data is checked token by token when it is read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from spillover.memory.tiers.base import CopyIn, CopyOut, Lane, Ticket, TierStats
from support.simulated import SLOT, SimulatedRunner


class SimulatedLink:
    """Copies the simulated runner's records of a block. `fault` decides whether a copy, in either direction, fails."""

    def __init__(self, runner: SimulatedRunner, fault: Callable[[], bool] = lambda: False) -> None:
        self.block_bytes = self.slot_bytes = runner.block_size * SLOT.size
        self.copied_out = self.copied_in = 0
        self._runner = runner
        self._fault = fault

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            if self._fault():
                raise OSError("injected")
            for offset in range(self._runner.block_size):
                group, prefix = self._runner.slots.get((block, offset), (-1, 0))
                SLOT.pack_into(slot, offset * SLOT.size, group >= 0, group, prefix)
            self.copied_out += 1

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            fails = self._fault()
            for offset in range(self._runner.block_size):
                present, group, prefix = SLOT.unpack_from(slot, offset * SLOT.size)
                if present:  # a failed copy leaves garbage, which must never be read
                    self._runner.slots[block, offset] = (-7, 0) if fails else (group, prefix)
            if fails:
                raise OSError("injected")
            self.copied_in += 1

    def close(self) -> None:
        pass


class DictTier:
    """A tier in a dictionary, with threads and deadlines like real tiers."""

    def __init__(self, wake: Callable[[], None], name: str = "disk", capacity: int = 1 << 30, delay: float = 0.0,
                 lookup_delay: float | None = None, seed: int = 0, lookup_seconds: float = 0.2) -> None:
        """`lookup_delay`: duration of a lookup, which is then the only way to find blocks; at most `lookup_seconds`."""
        self.name = name
        self.down = False  # True: every operation fails
        self.blocks: dict[bytes, bytes] = {}
        self.loads = self.stores = 0
        self._capacity = capacity
        self._delay = delay
        self._lookup_delay, self._lookup_seconds = lookup_delay, lookup_seconds
        self._lane = Lane(name, 2, wake)
        self._lock = threading.Lock()
        self._random = random.Random(seed)

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        def look() -> list[bool]:
            time.sleep(self._lookup_delay or 0)
            return [key in self.blocks and not self.down for key in keys]

        if self._lookup_delay is None:
            return Ticket.ended(look())
        return self._lane.submit(look, time.monotonic() + self._lookup_seconds)

    def has(self, key: bytes) -> bool | None:
        return key in self.blocks and not self.down if self._lookup_delay is None else None

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [self._lane.submit(lambda k=key, v=view: self._put(k, v), time.monotonic() + 5) for key, view in items]

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return [self._lane.submit(lambda k=key, v=view: self._get(k, v), time.monotonic() + 5) for key, view in items]

    def evict(self, count: int) -> Ticket[int]:
        with self._lock:
            for key in list(self.blocks)[:count]:
                del self.blocks[key]
        return Ticket.ended(count)

    def poll(self) -> None:
        self._lane.drain()

    def clear(self) -> None:
        self.blocks.clear()

    def stats(self) -> TierStats:
        return TierStats(blocks=len(self.blocks), stores=self.stores, loads=self.loads)

    def close(self, deadline: float) -> None:
        self._lane.close(deadline)

    def _put(self, key: bytes, view: memoryview) -> bool:
        time.sleep(self._delay * self._random.random())
        if self.down:
            raise OSError("injected: it is down")
        with self._lock:
            if len(self.blocks) >= self._capacity:
                del self.blocks[next(iter(self.blocks))]
            self.blocks[key] = bytes(view)
            self.stores += 1
        return True

    def _get(self, key: bytes, view: memoryview) -> bool:
        time.sleep(self._delay * self._random.random())
        with self._lock:
            found = self.blocks.get(key) if not self.down else None
        if found is None:
            view[:] = b"\xff" * len(view)  # data left by a failed load must never be read
            return False
        view[:] = found
        self.loads += 1
        return True


class MappedDictTier(DictTier):
    """A pool that requires lookups, and copies between its blocks and the device by itself."""

    def __init__(self, wake: Callable[[], None], nbytes: int, **options: Any) -> None:
        super().__init__(wake, "pool", lookup_delay=0.0, **options)
        self._nbytes = nbytes

    def store_from(self, items: Sequence[tuple[bytes, int]], copy_out: CopyOut) -> list[Ticket[bool]]:
        def put(key: bytes, block: int) -> bool:
            view = memoryview(bytearray(self._nbytes))
            copy_out([block], [view])
            return self._put(key, view)

        return [self._lane.submit(lambda k=key, b=block: put(k, b), time.monotonic() + 5) for key, block in items]

    def load_to(self, items: Sequence[tuple[bytes, int]], copy_in: CopyIn) -> list[Ticket[bool]]:
        def get(key: bytes, block: int) -> bool:
            view = memoryview(bytearray(self._nbytes))
            found = self._get(key, view)
            copy_in([view], [block])  # a block that was not found is garbage, which must never be read
            return found

        return [self._lane.submit(lambda k=key, b=block: get(k, b), time.monotonic() + 5) for key, block in items]
