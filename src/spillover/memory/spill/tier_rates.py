"""Measured speeds of loads from each tier."""

from __future__ import annotations

from collections.abc import Iterable


class TierRates(dict[str, float]):
    """Bytes per second that loads from each tier reach."""

    def seconds(self, tiers: Iterable[str], nbytes: int) -> float:
        """Estimate how long a load that passes through these tiers takes."""
        return nbytes / min(self.get(tier, 1e9) for tier in tiers)

    def observe(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note a completed load: a higher rate is adopted at once; a lower one, perhaps due to waiting, counts 5%."""
        rate, known = nbytes / max(1e-6, seconds), self.get(tier, 0.0)
        self[tier] = rate if rate > known else known + 0.05 * (rate - known)
