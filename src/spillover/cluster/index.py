"""Which replica holds which block, and where: one table for all replicas, a bit for each, so that a prompt is looked up
once however many replicas there are. Knows nothing of how that became known. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spillover.memory.kv.event_wire import CPU, GPU, MEDIA, STORAGE

MOST_REPLICAS = 256
STRIDE = 16  # blocks that are looked over at once where all that are left have them


@dataclass(slots=True)
class Match:
    """How many blocks of a prompt a replica has, from the first on without a gap, by where they are."""

    device: int = 0
    host: int = 0
    storage: int = 0
    expected: int = 0  # a request that was sent there computes them, or will

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.storage + self.expected


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[str, dict[int, int]] = {medium: {} for medium in MEDIA}  # key -> bits of replicas
        self._expecting: dict[int, int] = {}
        self._held: dict[int, dict[str, set[int]]] = {}  # by replica
        self._expected: dict[int, dict[int, int]] = {}  # by replica: how many requests compute the block

    def add(self, replica: int) -> None:
        assert 0 <= replica < MOST_REPLICAS
        self._held[replica] = {medium: set() for medium in MEDIA}
        self._expected[replica] = {}

    def store(self, replica: int, medium: str, keys: Iterable[int]) -> None:
        holders, held, bit = self._holders[medium], self._held[replica][medium], 1 << replica
        for key in keys:
            held.add(key)
            holders[key] = holders.get(key, 0) | bit

    def remove(self, replica: int, medium: str, keys: Iterable[int]) -> None:
        held, bit = self._held[replica][medium], 1 << replica
        for key in keys:
            if key in held:
                held.remove(key)
                _drop(self._holders[medium], key, bit)

    def clear(self, replica: int) -> None:
        """Forget what a replica holds, not what requests that are on their way will bring."""
        for medium, held in self._held[replica].items():
            for key in held:
                _drop(self._holders[medium], key, 1 << replica)
            held.clear()

    def expect(self, replica: int, keys: Iterable[int]) -> None:
        """Note that a request computes these blocks there; `unexpect` must follow."""
        expected, bit = self._expected[replica], 1 << replica
        for key in keys:
            expected[key] = expected.get(key, 0) + 1
            self._expecting[key] = self._expecting.get(key, 0) | bit

    def unexpect(self, replica: int, keys: Iterable[int]) -> None:
        expected, bit = self._expected[replica], 1 << replica
        for key in keys:
            expected[key] -= 1
            if not expected[key]:
                del expected[key]
                _drop(self._expecting, key, bit)

    def held(self, replica: int, medium: str) -> int:
        """Return the number of blocks that a replica holds on a medium."""
        return len(self._held[replica][medium])

    def keys(self, replica: int, medium: str) -> frozenset[int]:
        return frozenset(self._held[replica][medium])

    def match(self, keys: Sequence[int], replicas: Iterable[int]) -> dict[int, Match]:
        """Return what each of these replicas has of a prompt whose blocks have these keys."""
        found = {replica: Match() for replica in replicas}
        alive = sum(1 << replica for replica in found)
        on_device, on_host = self._holders[GPU].get, self._holders[CPU].get
        on_storage, expecting = self._holders[STORAGE].get, self._expecting.get
        since = 0  # from this block on, all that are alive had every block on the device
        place, count = -1, len(keys)
        while (place := place + 1) < count:
            # Who has a block on the device has those before it: engines evict the end of a prompt first.
            if place + STRIDE < count and alive and on_device(keys[place + STRIDE], 0) & alive == alive:
                place += STRIDE
                continue
            key = keys[place]
            near = on_device(key, 0) & alive
            if near == alive:
                continue
            host = on_host(key, 0) & alive & ~near
            storage = on_storage(key, 0) & alive & ~near & ~host
            coming = expecting(key, 0) & alive & ~near & ~host & ~storage
            still = near | host | storage | coming
            for replica in _bits(alive):
                match, bit = found[replica], 1 << replica
                match.device += place - since
                if near & bit:
                    match.device += 1
                elif host & bit:
                    match.host += 1
                elif storage & bit:
                    match.storage += 1
                elif coming & bit:
                    match.expected += 1
            alive, since = still, place + 1
            if not alive:
                return found
        for replica in _bits(alive):
            found[replica].device += count - since
        return found


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _drop(table: dict[int, int], key: int, bit: int) -> None:
    left = table.get(key, 0) & ~bit
    if left:
        table[key] = left
    else:
        table.pop(key, None)
