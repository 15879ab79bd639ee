"""What a draft row costs where experts are paged: the experts that it asks for and that are not on the device.

A verify step fetches what all of its rows ask for. What an accepted row fetched would have been fetched by the steps
that it replaces; what a wasted row fetched is lost, and a wasted token is routed to other experts than those in use. So
a row is priced by its chance: `seconds per expert * (chance * experts of an accepted row + (1 - chance) * experts of a
wasted one)`. All three are learned while steps run; the first begins at what the measured link says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spillover.engine.speculation.costs import DOUBTED, Numbers, StepCosts
from spillover.engine.step import Phase, Step
from spillover.engine.weights.traffic import WeightTraffic

FADE = 0.97  # what is left of sums after a step
PRIOR_STEPS = 2.0  # that both kinds of rows are taken to have fetched as much as a decoded one
PRIOR_EXPERTS = 64.0  # squared experts for which the link's word counts
MOST_OF_LINK = 4.0  # times what the link says that an expert takes at most
MOSTLY_PLAIN = 16  # decoded rows for each drafted one from which what all fetched is taken for that of decoded rows


class ExpertPrice:
    def __init__(self, traffic: Callable[[], WeightTraffic], link_rate: float | None = None) -> None:
        """Start measuring. `traffic`: counts so far, which wait for a step that runs; `link_rate`: bytes a second."""
        self._traffic = traffic
        self._link_rate = link_rate
        self._seen = traffic()
        self._rows = 0  # decoded since the counts were read, by steps without drafts
        self._steps = 0  # that decoded them
        self._prefilled = False  # since then
        self._plain = [0.0, 0.0]  # experts and rows of steps without drafts, fading
        self._products = np.zeros((2, 2))  # of (accepted, wasted) rows of a step with itself, fading
        self._fetched = np.zeros(2)  # and with the experts that the step fetched for its drafts
        self._open: tuple[int, float] | None = None  # drafted rows of the last step, and experts for them
        self._accepted = 0  # of these, as told so far
        self._means: dict[int, tuple[float, float]] = {}  # by rows of a step with drafts: experts, seconds
        self._spread = [0.0, 0.0]  # squares of experts about their mean, and their products with seconds

    def observe(self, step: Step, seconds: float, idle: bool) -> float:
        """Take in a step that has ended, and return how much of it its draft rows' experts took. `idle`: no other step
        runs."""
        self._settle()
        begins = self._prefilled and not step.has_prefill  # what follows is read apart from what prompts fetched
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
        if prefilled:  # what prompts fetch says nothing of decoding
            return 0.0
        if rows >= MOSTLY_PLAIN * drafted:
            # While steps overlap the counts are not read, so this may span hundreds of them, and routing have changed.
            fade = FADE ** steps
            self._plain = [fade * self._plain[0] + fetched, fade * self._plain[1] + rows]
            return 0.0
        if rows:  # steps without drafts were not read apart from this one
            return 0.0
        self._learn_seconds(decoded + drafted, fetched, seconds)
        extra = max(0.0, fetched - self.plain_experts * decoded)
        self._open = drafted, extra
        return min(extra * self.expert_seconds, seconds)

    def verified(self, accepted: int) -> None:
        """Note how many of a request's draft rows of the last step were accepted."""
        self._accepted += accepted

    def cumulative(self, chances: Numbers) -> Numbers:
        """Return the seconds that the experts of the first 0, 1, 2, ... draft rows are expected to take."""
        accepted, wasted = self.row_experts
        each = self.expert_seconds * (chances * accepted + (1.0 - chances) * wasted)
        return np.concatenate(([0.0], np.cumsum(each)))

    @property
    def plain_experts(self) -> float:
        """Return the experts that a decoded row fetches."""
        return self._plain[0] / self._plain[1] if self._plain[1] else 0.0

    @property
    def row_experts(self) -> tuple[float, float]:
        """Return the experts that an accepted and a wasted draft row fetch."""
        prior = self.plain_experts
        fitted = np.linalg.solve(self._products + PRIOR_STEPS * np.eye(2), self._fetched + PRIOR_STEPS * prior)
        return max(0.0, float(fitted[0])), max(0.0, float(fitted[1]))

    @property
    def expert_seconds(self) -> float:
        """Return what one expert more takes in a step."""
        squares, products = self._spread
        if self._link_rate is None or not self._seen.fetches:
            return max(0.0, products / (squares + PRIOR_EXPERTS))
        told = self._seen.bytes_moved / self._seen.fetches / self._link_rate
        fitted = (products + PRIOR_EXPERTS * told) / (squares + PRIOR_EXPERTS)
        return min(max(0.0, fitted), MOST_OF_LINK * told)

    def _settle(self) -> None:
        """Take in the last step's outcomes."""
        if self._open is not None:
            drafted, extra = self._open
            rows = np.array([float(self._accepted), float(drafted - self._accepted)])
            self._products = FADE * self._products + np.outer(rows, rows)
            self._fetched = FADE * self._fetched + extra * rows
        self._open, self._accepted = None, 0

    def _learn_seconds(self, rows: int, fetched: float, seconds: float) -> None:
        """Compare a step with others of as many rows."""
        mean = self._means.get(rows)
        if mean is not None and mean[1] > DOUBTED * seconds:  # one that compiled a kernel or captured a graph
            mean = None
        if mean is not None:
            apart, longer = fetched - mean[0], seconds - mean[1]
            self._spread = [FADE * self._spread[0] + apart * apart, FADE * self._spread[1] + apart * longer]
            mean = mean[0] + (1 - FADE) * apart, mean[1] + (1 - FADE) * longer
        self._means[rows] = mean or (fetched, seconds)


class PricedCosts(StepCosts):
    """Seconds of steps with drafts, of which the experts of draft rows are priced apart."""

    def __init__(self, price: ExpertPrice, below: StepCosts | None = None) -> None:
        super().__init__(below)
        self._price = price

    def price(self, chances: Numbers) -> Numbers:
        return self._price.cumulative(chances)


def _missing(traffic: WeightTraffic) -> int:
    """Return the experts that were asked for and not on the device; an idle host computes some of them, as fast as the
    link brings others."""
    return traffic.expert_misses + traffic.expert_hosted
