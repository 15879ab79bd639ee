"""How fast loads from each tier are."""

from __future__ import annotations

from collections.abc import Iterable


class TierRates(dict[str, float]):
    """Bytes per second that loads from each tier reach."""

    def seconds(self, tiers: Iterable[str], nbytes: int) -> float:
        """Return how long a load that passes these tiers takes, as far as is known."""
        return nbytes / min(self.get(tier, 1e9) for tier in tiers)

    def observe(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note a load: a faster one counts at once; a slower one may only have waited, and counts little."""
        rate, known = nbytes / max(1e-6, seconds), self.get(tier, 0.0)
        self[tier] = rate if rate > known else known + 0.05 * (rate - known)
