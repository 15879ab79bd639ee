"""Counters of weights that are not resident: bytes moved, and where the experts that steps needed were found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightTraffic:
    """Counts since the weights were loaded."""

    bytes_moved: int = 0  # bytes of weights that were copied to the device
    fetches: int = 0  # number of copies to the device, of layers or experts
    disk_bytes: int = 0  # bytes of weights that were read from disk
    expert_hits: int = 0  # experts of a layer that a step needed and found on the device
    expert_misses: int = 0  # experts that a step needed and that were fetched to the device
    expert_hosted: int = 0  # experts that a step needed and that the host computed
    bytes_back: int = 0  # bytes copied from the device to the host, which only happens to managed memory
    faults: int = 0  # pages of managed memory that moved because they were touched, where faults are counted

    @property
    def hit_rate(self) -> float | None:
        lookups = self.expert_hits + self.expert_misses + self.expert_hosted
        return self.expert_hits / lookups if lookups else None

    def plus(self, other: WeightTraffic) -> WeightTraffic:
        return WeightTraffic(**{name: mine + getattr(other, name) for name, mine in vars(self).items()})

    def since(self, earlier: WeightTraffic) -> WeightTraffic:
        return WeightTraffic(**{name: mine - getattr(earlier, name) for name, mine in vars(self).items()})
