"""A table of which replica holds which block in which tier, with bits for each replica, so that one lookup of a prompt
serves all replicas. It does not know how this was learned. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spillover.memory.kv.event_wire import MEDIA

MOST_REPLICAS = 256
STRIDE = 16  # blocks skipped at once if all remaining replicas have the last of them
WIDTH = 4  # bits per replica: one per medium, and one for blocks that a request will compute
EXPECTED, ANYWHERE = 8, 15
_BITS = {medium: 1 << position for position, medium in enumerate(MEDIA)}


@dataclass(slots=True)
class Match:
    """The number of a prompt's blocks that a replica has, from the first on without a gap, by tier."""

    device: int = 0
    host: int = 0
    storage: int = 0
    expected: int = 0  # blocks that a request sent to the replica computes or will compute

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.storage + self.expected


class PrefixIndex:
    def __init__(self) -> None:
        self._held: dict[int, dict[str, set[int]]] = {}  # replica -> medium -> keys
        # Per key four bits per replica: on its device, in its host memory, on its disk, expected. One lookup finds all.
        self._masks: dict[int, int] = {}
        self._also_expected: dict[int, dict[int, int]] = {}  # replica -> key -> requests computing it, beyond the first

    def add(self, replica: int) -> None:
        assert 0 <= replica < MOST_REPLICAS
        self._held[replica] = {medium: set() for medium in MEDIA}
        self._also_expected[replica] = {}

    def store(self, replica: int, medium: str, keys: Iterable[int]) -> None:
        masks, held, bit = self._masks, self._held[replica][medium], _BITS[medium] << WIDTH * replica
        for key in keys:
            held.add(key)
            masks[key] = masks.get(key, 0) | bit

    def remove(self, replica: int, medium: str, keys: Iterable[int]) -> None:
        held, bit = self._held[replica][medium], _BITS[medium] << WIDTH * replica
        for key in keys:
            if key in held:
                held.remove(key)
                self._drop(key, bit)

    def clear(self, replica: int) -> None:
        """Forget a replica's blocks, but not those that requests in flight will compute."""
        for medium, held in self._held[replica].items():
            for key in held:
                self._drop(key, _BITS[medium] << WIDTH * replica)
            held.clear()

    def expect(self, replica: int, keys: Iterable[int]) -> None:
        """Record that a request computes these blocks on the replica; `unexpect` must follow."""
        masks, repeats, bit = self._masks, self._also_expected[replica], EXPECTED << WIDTH * replica
        for key in keys:
            known = masks.get(key, 0)
            if known & bit:
                repeats[key] = repeats.get(key, 0) + 1
            else:
                masks[key] = known | bit

    def unexpect(self, replica: int, keys: Iterable[int]) -> None:
        repeats, bit = self._also_expected[replica], EXPECTED << WIDTH * replica
        for key in keys:
            others = repeats.get(key, 0)
            if not others:
                self._drop(key, bit)
            elif others == 1:
                del repeats[key]
            else:
                repeats[key] = others - 1

    def held(self, replica: int, medium: str) -> int:
        """Return the number of blocks that a replica holds on a medium."""
        return len(self._held[replica][medium])

    def keys(self, replica: int, medium: str) -> frozenset[int]:
        return frozenset(self._held[replica][medium])

    def match(self, keys: Sequence[int], replicas: Iterable[int]) -> dict[int, Match]:
        """Return what each of these replicas has of a prompt whose blocks have these keys."""
        found = {replica: Match() for replica in replicas}
        alive, devices = 0, 0  # bits of the replicas that have every block so far
        for replica in found:
            alive |= ANYWHERE << WIDTH * replica
            devices |= 1 << WIDTH * replica
        look, now, since = self._masks.get, -1, 0  # blocks from `since` on all have the bits `now`
        position, count = 0, len(keys)
        while position < count:
            # A replica with a block on the device has all before it: engines evict the end of a prompt first.
            if position + STRIDE < count and look(keys[position + STRIDE], 0) & devices == devices:
                here, after = devices, position + STRIDE + 1
            else:
                here, after = look(keys[position], 0) & alive, position + 1
            if here != now:
                _add(found, now, position - since)
                now, since = here, position
                alive, devices = _left(found, here)
                if not alive:
                    return found
            position = after
        _add(found, now, count - since)
        return found

    def _drop(self, key: int, bit: int) -> None:
        left = self._masks.get(key, 0) & ~bit
        if left:
            self._masks[key] = left
        else:
            self._masks.pop(key, None)


def _left(replicas: Iterable[int], here: int) -> tuple[int, int]:
    """Return bits of the replicas that have a block anywhere: all bits of each, and the device bit of each."""
    alive = devices = 0
    for replica in replicas:
        if here >> WIDTH * replica & ANYWHERE:
            alive |= ANYWHERE << WIDTH * replica
            devices |= 1 << WIDTH * replica
    return alive, devices


def _add(found: dict[int, Match], here: int, blocks: int) -> None:
    """Count blocks that all have the same bits, each in its nearest tier."""
    for replica, match in found.items():
        at = here >> WIDTH * replica & ANYWHERE
        if at & 1:
            match.device += blocks
        elif at & 2:
            match.host += blocks
        elif at & 4:
            match.storage += blocks
        elif at:
            match.expected += blocks
