"""The cost of a draft row if experts are paged: that of its experts which are not on the device.

A verify step fetches the experts of all its rows. Those of an accepted row would have been fetched by the steps that it
replaces; those of a rejected (wasted) row are useless, and its token is routed to experts that are not in use. So the
price of a row depends on its chance to be accepted: `seconds per expert * (chance * experts of an accepted row + (1 -
chance) * experts of a wasted row)`. All three are learned while steps run; the first starts at the measured link rate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spillover.engine.speculation.costs import OUTLIER_FACTOR, Numbers, StepCosts
from spillover.engine.step import Phase, Step
from spillover.engine.weights.traffic import WeightTraffic

FADE = 0.97  # factor by which sums fade per step
PRIOR_STEPS = 2.0  # weight, in steps, of the prior that accepted and wasted rows fetch as much as decoded ones
PRIOR_EXPERTS = 64.0  # weight, in squared experts, of the link rate as the prior of the seconds per expert
MOST_OF_LINK = 4.0  # maximum seconds per expert, as a multiple of those by the link rate
MOSTLY_PLAIN = 16  # decoded rows per draft row from which all fetches are attributed to decoded rows


class ExpertPrice:
    def __init__(self, traffic: Callable[[], WeightTraffic], link_rate: float | None = None) -> None:
        """Start measuring. `traffic`: returns the counts, after waiting for a running step; `link_rate`: bytes/s."""
        self._traffic = traffic
        self._link_rate = link_rate
        self._seen = traffic()
        self._rows = 0  # rows decoded by steps without drafts since the counts were read
        self._steps = 0  # number of these steps
        self._prefilled = False  # whether a step had prefill since the counts were read
        self._plain = [0.0, 0.0]  # fading sums of experts fetched and of rows, of steps without drafts
        self._products = np.zeros((2, 2))  # fading sum of outer products of a step's (accepted, wasted) rows
        self._fetched = np.zeros(2)  # fading sum of (accepted, wasted) rows times experts fetched for the drafts
        self._open: tuple[int, float] | None = None  # (draft rows of the last step, experts fetched for them)
        self._accepted = 0  # rows of these that are known to be accepted so far
        self._means: dict[int, tuple[float, float]] = {}  # rows of a step with drafts -> mean (experts, seconds)
        self._spread = [0.0, 0.0]  # fading sums: squared deviation of experts, and its product with that of seconds

    def observe(self, step: Step, seconds: float, idle: bool) -> float:
        """Process a completed step; return the seconds that the experts of its draft rows took. `idle`: whether no
        other step runs."""
        self._apply_outcomes()
        begins = self._prefilled and not step.has_prefill  # read counts now, to separate prompts from later steps
        drafted = sum(len(item.draft) for item in step.items)
        decoded = sum(item.phase is not Phase.PREFILL for item in step.items)
        self._prefilled |= step.has_prefill
        if not drafted:
            self._rows += decoded
            self._steps += 1
        if not idle and not begins:
            return 0.0
        now = self._traffic()
        fetched = _missing(now) - _missing(self._seen)
        self._seen, rows, steps, prefilled = now, self._rows, self._steps, self._prefilled
        self._rows, self._steps, self._prefilled = 0, 0, False
        if prefilled:  # experts that prompts fetch say nothing about decode
            return 0.0
        if rows >= MOSTLY_PLAIN * drafted:
            # Counts are not read while steps overlap, so they may cover hundreds of steps with changing routing.
            fade = FADE ** steps
            self._plain = [fade * self._plain[0] + fetched, fade * self._plain[1] + rows]
            return 0.0
        if rows:  # the counts also cover steps without drafts
            return 0.0
        self._learn_seconds(decoded + drafted, fetched, seconds)
        extra = max(0.0, fetched - self.plain_experts * decoded)
        self._open = drafted, extra
        return min(extra * self.expert_seconds, seconds)

    def verified(self, accepted: int) -> None:
        """Record how many of a request's draft rows of the last step were accepted."""
        self._accepted += accepted

    def cumulative(self, chances: Numbers) -> Numbers:
        """Return the seconds that the experts of the first 0, 1, 2, ... draft rows are expected to take."""
        accepted, wasted = self.row_experts
        each = self.expert_seconds * (chances * accepted + (1.0 - chances) * wasted)
        return np.concatenate(([0.0], np.cumsum(each)))

    @property
    def plain_experts(self) -> float:
        """Return the mean number of experts that a decoded row fetches."""
        return self._plain[0] / self._plain[1] if self._plain[1] else 0.0

    @property
    def row_experts(self) -> tuple[float, float]:
        """Return the estimated number of experts that an accepted and a wasted draft row fetch."""
        prior = self.plain_experts
        fitted = np.linalg.solve(self._products + PRIOR_STEPS * np.eye(2), self._fetched + PRIOR_STEPS * prior)
        return max(0.0, float(fitted[0])), max(0.0, float(fitted[1]))

    @property
    def expert_seconds(self) -> float:
        """Return the seconds that each further expert adds to a step."""
        squares, products = self._spread
        if self._link_rate is None or not self._seen.fetches:
            return max(0.0, products / (squares + PRIOR_EXPERTS))
        link_seconds = self._seen.bytes_moved / self._seen.fetches / self._link_rate
        fitted = (products + PRIOR_EXPERTS * link_seconds) / (squares + PRIOR_EXPERTS)
        return min(max(0.0, fitted), MOST_OF_LINK * link_seconds)

    def _apply_outcomes(self) -> None:
        """Add the outcomes of the last step to the sums."""
        if self._open is not None:
            drafted, extra = self._open
            rows = np.array([float(self._accepted), float(drafted - self._accepted)])
            self._products = FADE * self._products + np.outer(rows, rows)
            self._fetched = FADE * self._fetched + extra * rows
        self._open, self._accepted = None, 0

    def _learn_seconds(self, rows: int, fetched: float, seconds: float) -> None:
        """Learn the seconds per expert by comparing a step with others of the same number of rows."""
        mean = self._means.get(rows)
        if mean is not None and mean[1] > OUTLIER_FACTOR * seconds:  # the mean includes a compilation or graph capture
            mean = None
        if mean is not None:
            more, longer = fetched - mean[0], seconds - mean[1]
            self._spread = [FADE * self._spread[0] + more * more, FADE * self._spread[1] + more * longer]
            mean = mean[0] + (1 - FADE) * more, mean[1] + (1 - FADE) * longer
        self._means[rows] = mean or (fetched, seconds)


class PricedCosts(StepCosts):
    """Seconds of steps with drafts, in which the experts of draft rows are priced separately."""

    def __init__(self, price: ExpertPrice, fallback: StepCosts | None = None) -> None:
        super().__init__(fallback)
        self._price = price

    def price(self, chances: Numbers) -> Numbers:
        return self._price.cumulative(chances)


def _missing(traffic: WeightTraffic) -> int:
    """Return the number of experts that were needed and not on the device; the host computes some of them, as fast as
    the link copies others."""
    return traffic.expert_misses + traffic.expert_hosted
