"""Several disks as one tier: each key is assigned to one disk, by its hash and in proportion to the disks' sizes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import xxhash

from spillover.errors import SpilloverError
from spillover.memory.kv.events import BlockEvents
from spillover.memory.tiers.base import Ticket, TierStats
from spillover.memory.tiers.disk import DiskTier


class Disks:
    """A tier of several disks. Adding or removing one moves only its keys; a failed disk loses only its keys."""

    name = "disk"

    def __init__(self, disks: Sequence[DiskTier]) -> None:
        if not disks:
            raise SpilloverError("a striped disk cache needs at least one disk")
        self.disks = list(disks)
        self._seeds = [xxhash.xxh3_64_intdigest(str(disk.path.absolute()).encode()) for disk in disks]

    def disk_of(self, key: bytes) -> int:
        """Return the index of the disk that a key is assigned to, by weighted rendezvous hashing."""
        best, best_score = 0, -math.inf
        for i, (seed, disk) in enumerate(zip(self._seeds, self.disks, strict=True)):
            draw = (xxhash.xxh3_64_intdigest(key, seed) + 1) / (2**64 + 1)  # 0 < draw < 1
            score = -disk.capacity_bytes / math.log(draw)
            if score > best_score:
                best, best_score = i, score
        return best

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        found = [False] * len(keys)
        for disk, indices in self._by_disk(keys):
            ticket = disk.lookup([keys[i] for i in indices])
            for i, there in zip(indices, ticket.result() or (), strict=True):
                found[i] = there
        return Ticket.ended(found)

    def has(self, key: bytes) -> bool:
        return self.disks[self.disk_of(key)].has(key)

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return self._spread(items, DiskTier.store)

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        return self._spread(items, DiskTier.load)

    def evict(self, count: int) -> Ticket[int]:
        """Evict from each disk in proportion to its number of blocks, which approximates LRU over all disks."""
        held = [disk.stats().blocks for disk in self.disks]
        evicted = 0
        for i, disk in enumerate(self.disks):
            left = sum(held[i:])
            share = round((count - evicted) * held[i] / left) if left else 0
            evicted += disk.evict(min(share, count - evicted)).result() or 0
        return Ticket.ended(evicted)

    def poll(self) -> None:
        for disk in self.disks:
            disk.poll()

    def clear(self) -> None:
        for disk in self.disks:
            disk.clear()

    def publish_to(self, events: BlockEvents) -> None:
        """Report every block that lookups find, and changes; a disk may still have keys now assigned to another."""
        for index, disk in enumerate(self.disks):
            disk.publish_to(_OwnKeys(events, self, index))

    def stats(self) -> TierStats:
        """Return sums over the disks; the tier is available if any disk is."""
        each = [asdict(disk.stats()) for disk in self.disks]
        sums = {name: sum(stats[name] for stats in each) for name in each[0]}
        return TierStats(**sums | {"available": any(stats["available"] for stats in each)})

    def close(self, deadline: float) -> None:
        for disk in self.disks:
            disk.close(deadline)

    def max_blocks(self) -> int:
        return sum(disk.max_blocks() for disk in self.disks)

    def damage(self, key: bytes, bit: int) -> bool:
        return self.disks[self.disk_of(key)].damage(key, bit)

    def check(self) -> None:
        for disk in self.disks:
            disk.check()

    def _by_disk(self, keys: Sequence[bytes]) -> list[tuple[DiskTier, list[int]]]:
        indices: list[list[int]] = [[] for _ in self.disks]
        for i, key in enumerate(keys):
            indices[self.disk_of(key)].append(i)
        return [(disk, mine) for disk, mine in zip(self.disks, indices, strict=True) if mine]

    def _spread(
        self,
        items: Sequence[tuple[bytes, memoryview]],
        do: Callable[[DiskTier, Sequence[tuple[bytes, memoryview]]], list[Ticket[bool]]],
    ) -> list[Ticket[bool]]:
        tickets: dict[int, Ticket[bool]] = {}
        for disk, indices in self._by_disk([key for key, _ in items]):
            tickets.update(zip(indices, do(disk, [items[i] for i in indices]), strict=True))
        return [tickets[i] for i in range(len(items))]


class _OwnKeys:
    """A listener to one disk, which forwards events of keys that are assigned to that disk."""

    def __init__(self, events: BlockEvents, disks: Disks, index: int) -> None:
        self._events, self._disks, self._index = events, disks, index

    def stored(self, tier: str, key: bytes) -> None:
        if self._disks.disk_of(key) == self._index:
            self._events.stored(tier, key)

    def removed(self, tier: str, key: bytes) -> None:
        if self._disks.disk_of(key) == self._index:
            self._events.removed(tier, key)
