"""A replica's KV blocks in simulated time: those that requests hold, those kept for reuse, LRU; and host memory behind.

Blocks of one request are released from its last one on, so what others share goes last, as in the engine's tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spillover.memory.kv.event_wire import CPU, GPU


class Listener(Protocol):
    """What hears of blocks that come and go: a router's index, or nobody."""

    def store(self, medium: str, keys: Sequence[int]) -> None: ...

    def remove(self, medium: str, keys: Sequence[int]) -> None: ...


class Nobody:
    def store(self, medium: str, keys: Sequence[int]) -> None:
        """Do nothing."""

    def remove(self, medium: str, keys: Sequence[int]) -> None:
        """Do nothing."""


@dataclass
class Held:
    """Blocks of one request."""

    named: list[int] = field(default_factory=list)  # keys that others may find, in order, each counted once for it
    private: int = 0  # blocks that nobody else can find: not computed yet, or doubles
    doubles: int = 0  # private ones whose key another block already had


class BlockCache:
    def __init__(self, capacity: int, host_capacity: int = 0, listener: Listener | None = None) -> None:
        self.capacity = capacity
        self.host_capacity = host_capacity
        self._listener = listener or Nobody()
        self._users: dict[int, int] = {}  # key -> requests that hold the block; 0: evictable
        self._evictable: OrderedDict[int, None] = OrderedDict()  # used longest ago first
        self._host: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self.evictions = 0

    @property
    def used(self) -> int:
        """Return the blocks that hold something."""
        return len(self._users) + self._private

    @property
    def available(self) -> int:
        """Return the blocks that can be had: free, or evictable."""
        return self.capacity - self.used + len(self._evictable)

    def match(self, keys: Sequence[int], most: int) -> tuple[int, int]:
        """Return how many leading blocks are on the device, and how many behind them in host memory."""
        device, most = 0, min(most, len(keys))
        while device < most and keys[device] in self._users:
            device += 1
        host = device
        while host < most and keys[host] not in self._users and keys[host] in self._host:
            host += 1
        return device, host - device

    def hold(self, held: Held, keys: Iterable[int]) -> None:
        """Give a request blocks that are on the device."""
        for key in keys:
            if not self._users[key]:
                del self._evictable[key]
            self._users[key] += 1
            held.named.append(key)
            if key in self._host:
                self._host.move_to_end(key)

    def take(self, held: Held, count: int) -> bool:
        """Give a request `count` empty blocks, evicting where none is free; False: there are not as many."""
        if count > self.available:
            return False
        short = count - (self.capacity - self.used)
        if short > 0:
            self._evict(short)
        held.private += count
        self._private += count
        return True

    def name(self, held: Held, keys: Sequence[int]) -> None:
        """Let others find a request's next blocks, which have been computed."""
        new = []
        for key in keys:
            if key in self._users:  # computed twice at once: the double goes with its request
                if not self._users[key]:
                    del self._evictable[key]
                self._users[key] += 1
                held.doubles += 1
            else:
                self._users[key] = 1
                held.private -= 1
                self._private -= 1
                new.append(key)
            held.named.append(key)
        if new:
            self._listener.store(GPU, new)

    def release(self, held: Held) -> None:
        """Take a request's blocks back; those with a name are kept until their room is needed."""
        for key in reversed(held.named):
            self._users[key] -= 1
            if not self._users[key]:
                self._evictable[key] = None
        self._private -= held.private
        held.named, held.private, held.doubles = [], 0, 0

    def check(self) -> None:
        """Assert what must always hold."""
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
