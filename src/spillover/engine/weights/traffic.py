"""What weights that are not resident cost: bytes that moved, and where the experts that tokens asked for were."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightTraffic:
    """Since the weights were loaded."""

    bytes_moved: int = 0  # to the device, for use
    fetches: int = 0  # copies, of layers or experts
    disk_bytes: int = 0  # of them, read from disk first
    expert_hits: int = 0  # experts of a layer that a step asked for: on the device,
    expert_misses: int = 0  # brought there,
    expert_hosted: int = 0  # or computed by the host
    bytes_back: int = 0  # copied from the device to the host: pages of managed memory alone do that
    faults: int = 0  # pages of managed memory that came by being touched, where they are counted

    @property
    def hit_rate(self) -> float | None:
        asked = self.expert_hits + self.expert_misses + self.expert_hosted
        return self.expert_hits / asked if asked else None

    def plus(self, other: WeightTraffic) -> WeightTraffic:
        return WeightTraffic(**{name: mine + getattr(other, name) for name, mine in vars(self).items()})

    def since(self, earlier: WeightTraffic) -> WeightTraffic:
        return WeightTraffic(**{name: mine - getattr(earlier, name) for name, mine in vars(self).items()})
