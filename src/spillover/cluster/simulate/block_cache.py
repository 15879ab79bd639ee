"""A replica's KV blocks in simulated time: those held by requests, those kept for reuse (LRU), and host memory below.

A request's blocks are released from the last to the first, so shared ones are evicted last, as in the engine's tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spillover.memory.kv.event_wire import CPU, GPU


class Listener(Protocol):
    """A listener to blocks that are stored and removed, such as a router's index."""

    def store(self, medium: str, keys: Sequence[int]) -> None: ...

    def remove(self, medium: str, keys: Sequence[int]) -> None: ...


class NullListener:
    def store(self, medium: str, keys: Sequence[int]) -> None:
        """Do nothing."""

    def remove(self, medium: str, keys: Sequence[int]) -> None:
        """Do nothing."""


@dataclass
class Held:
    """The blocks of one request."""

    shared: list[int] = field(default_factory=list)  # keys that others can find, in order; the request uses each block
    private: int = 0  # number of blocks that other requests cannot find: not computed yet, or duplicates
    duplicates: int = 0  # number of private blocks whose key another block already had


class BlockCache:
    def __init__(self, capacity: int, host_capacity: int = 0, listener: Listener | None = None) -> None:
        self.capacity = capacity
        self.host_capacity = host_capacity
        self._listener = listener or NullListener()
        self._users: dict[int, int] = {}  # key -> number of requests that hold the block; 0 if evictable
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._host: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self.evictions = 0

    @property
    def used(self) -> int:
        """Return the number of blocks that hold KV or are allocated."""
        return len(self._users) + self._private

    @property
    def available(self) -> int:
        """Return the number of blocks that can be allocated: free or evictable."""
        return self.capacity - self.used + len(self._evictable)

    def match(self, keys: Sequence[int], most: int) -> tuple[int, int]:
        """Return how many leading blocks are on the device, and how many after them are in host memory."""
        device, most = 0, min(most, len(keys))
        while device < most and keys[device] in self._users:
            device += 1
        host = device
        while host < most and keys[host] not in self._users and keys[host] in self._host:
            host += 1
        return device, host - device

    def hold(self, held: Held, keys: Iterable[int]) -> None:
        """Let a request hold blocks that are on the device."""
        for key in keys:
            if not self._users[key]:
                del self._evictable[key]
            self._users[key] += 1
            held.shared.append(key)
            if key in self._host:
                self._host.move_to_end(key)

    def allocate(self, held: Held, count: int) -> bool:
        """Allocate `count` empty blocks for a request, evicting if necessary; return False if there are not enough."""
        if count > self.available:
            return False
        short = count - (self.capacity - self.used)
        if short > 0:
            self._evict(short)
        held.private += count
        self._private += count
        return True

    def publish(self, held: Held, keys: Sequence[int]) -> None:
        """Make a request's next blocks, which have been computed, available to other requests."""
        new = []
        for key in keys:
            if key in self._users:  # computed twice concurrently: the duplicate is freed with its request
                if not self._users[key]:
                    del self._evictable[key]
                self._users[key] += 1
                held.duplicates += 1
            else:
                self._users[key] = 1
                held.private -= 1
                self._private -= 1
                new.append(key)
            held.shared.append(key)
        if new:
            self._listener.store(GPU, new)

    def release(self, held: Held) -> None:
        """Release a request's blocks; those with a key are kept until they are evicted."""
        for key in reversed(held.shared):
            self._users[key] -= 1
            if not self._users[key]:
                self._evictable[key] = None
        self._private -= held.private
        held.shared, held.private, held.duplicates = [], 0, 0

    def check(self) -> None:
        """Assert the invariants."""
        assert self._private >= 0
        assert self.used <= self.capacity
        assert len(self._host) <= self.host_capacity
        assert set(self._evictable) == {key for key, users in self._users.items() if not users}

    def _evict(self, count: int) -> None:
        gone = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        for key in gone:
            del self._users[key]
        self.evictions += count
        self._listener.remove(GPU, gone)
        if not self.host_capacity:
            return
        new = [key for key in gone if key not in self._host]
        for key in gone:
            self._host[key] = None
            self._host.move_to_end(key)
        self._listener.store(CPU, new)
        while len(self._host) > self.host_capacity:
            self._listener.remove(CPU, (self._host.popitem(last=False)[0],))
