"""The map from experts to their slots on the device. It handles ids only; callers copy the weights.

Every expert has its home elsewhere and the device holds copies, so an evicted expert is dropped, not written back.
Each layer has its own quota of slots: layer * quota up to, but not including, (layer + 1) * quota.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spillover.memory.policies.experts.protocol import ExpertPolicy


@dataclass(frozen=True)
class CacheCounts:
    """Counts since the cache was created, in experts."""

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


class ExpertCache:
    def __init__(self, layers: int, experts: int, quota: int, policy: ExpertPolicy) -> None:
        if quota < 1:
            raise ValueError("a layer needs at least one slot")
        self.layers = layers
        self.experts = experts
        self.quota = min(quota, experts)
        self.policy = policy
        policy.on_load(layers, experts, self.quota)
        self._slot_of: list[dict[int, int]] = [{} for _ in range(layers)]  # expert -> slot
        self._free = [list(range(layer * self.quota, (layer + 1) * self.quota))[::-1] for layer in range(layers)]
        self._lent: list[list[int]] = [[] for _ in range(layers)]  # slots of each layer that are lent
        self._used: list[dict[int, int]] = [{} for _ in range(layers)]  # expert -> clock at its last use
        self._clock = 0
        self._counts = [0, 0, 0, 0]

    @property
    def counts(self) -> CacheCounts:
        return CacheCounts(*self._counts)

    @property
    def slots(self) -> int:
        return self.layers * self.quota

    def slot(self, layer: int, expert: int) -> int | None:
        return self._slot_of[layer].get(expert)

    def resident(self, layer: int) -> Collection[int]:
        return self._slot_of[layer].keys()

    def lookup(self, layer: int, expert: int) -> int | None:
        """Return the slot of an expert that is about to be used; None if it has none, which counts as a miss."""
        slot = self._slot_of[layer].get(expert)
        self._counts[0 if slot is not None else 1] += 1
        if slot is not None:
            self._touch(layer, expert)
        return slot

    def assign(self, layer: int, expert: int, keep: Collection[int] = (), demand: bool = True,
               pinned: bool = False) -> int | None:
        """Assign a slot to an expert that has none and return it; evict another expert if no slot is free.
        `keep`: experts that must not be evicted. `demand`: a step needs it now; False for a prefetch. `pinned`: experts
        of infinite worth may be evicted too. None if there is no expert that may be evicted."""
        if expert in self._slot_of[layer]:
            raise ValueError(f"expert {expert} of layer {layer} is there already")
        if self._free[layer]:
            slot = self._free[layer].pop()
        else:
            victim = self._victim(layer, keep, pinned)
            if victim is None:
                return None
            slot = self._slot_of[layer].pop(victim)
            self._counts[3] += 1
        self._slot_of[layer][expert] = slot
        self._touch(layer, expert)
        if not demand:
            self._counts[2] += 1
        return slot

    def lend(self, layer: int) -> range:
        """Withhold a slot from the layer, evicting if need be; empty if no other unpinned slot would remain."""
        worth = self.policy.worth(layer)
        pinned = sum(worth[expert] == float("inf") for expert in self._slot_of[layer])
        if self.usable(layer) - pinned <= 1:
            return range(0)
        if not self._free[layer]:
            victim = self._victim(layer, ())
            if victim is None:
                return range(0)
            self._free[layer].append(self._slot_of[layer].pop(victim))
            self._counts[3] += 1
        slot = self._free[layer].pop()
        self._lent[layer].append(slot)
        return range(slot, slot + 1)

    def usable(self, layer: int) -> int:
        """Return the number of slots of a layer that are not lent."""
        return self.quota - len(self._lent[layer])

    def return_slots(self, layer: int, slots: range) -> None:
        for slot in slots:
            self._lent[layer].remove(slot)
            self._free[layer].append(slot)

    def clear(self) -> None:
        for layer in range(self.layers):
            self._free[layer] += self._slot_of[layer].values()
            self._slot_of[layer].clear()

    def check(self) -> None:
        """Assert that the free, taken and lent slots of every layer add up to its quota, without duplicates."""
        for layer in range(self.layers):
            slots = [*self._free[layer], *self._slot_of[layer].values(), *self._lent[layer]]
            assert sorted(slots) == list(range(layer * self.quota, (layer + 1) * self.quota)), (layer, slots)

    def _touch(self, layer: int, expert: int) -> None:
        self._clock += 1
        self._used[layer][expert] = self._clock

    def _victim(self, layer: int, keep: Collection[int], pinned: bool = False) -> int | None:
        worth, used = self.policy.worth(layer), self._used[layer]
        candidates = [expert for expert in self._slot_of[layer]
                      if expert not in keep and (pinned or worth[expert] != float("inf"))]
        return min(candidates, key=lambda expert: (worth[expert], used[expert]), default=None)
