"""Comparison of two results on the same items: whether the second is better, worse, or no difference is shown.

Items are paired, so that their difficulty cancels out. For items that are right or wrong, McNemar's exact test uses
those that only one of the two has right: if neither is better, each is equally likely to. Other values are compared by
a bootstrap over pairs and by Student's test, whichever has the larger p: the first underestimates it for few pairs.
With m comparisons a verdict needs p below 0.05 / m, so that all verdicts hold together with 95%; the interval of each
difference is for that level as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from spillover.bench.statistics import student_within
from spillover.errors import SpilloverError
from spillover.eval.metrics import (
    CONFIDENCE,
    RESAMPLES,
    Floats,
    Metric,
    influence,
    is_share,
    resampled,
    student_reach,
)

BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"

Items = Mapping[str, Mapping[str, float]]  # values of metrics by item id


@dataclass(frozen=True)
class Difference:
    """The difference of `other` from `base` on the items that both have; low and high bound other - base."""

    task: str
    metric: str
    base: float
    other: float
    low: float
    high: float
    p: float
    items: int
    only_base: int | None  # number of items that only the base has right; None if items are not right or wrong
    only_other: int | None
    test: str  # "McNemar exact" or "paired bootstrap"
    verdict: str


def compare(tasks: Sequence[tuple[str, Sequence[Metric], Items, Items]], confidence: float = CONFIDENCE
            ) -> list[Difference]:
    """Compare every metric of every task; tasks are (name, metrics, base, other)."""
    comparisons = [(name, metric, base, other) for name, metrics, base, other in tasks for metric in metrics]
    alpha = (1 - confidence) / max(1, len(comparisons))
    return [_compare(name, metric, base, other, alpha) for name, metric, base, other in comparisons]


def mcnemar(only_base: int, only_other: int) -> float:
    """Return the exact two-sided p value: min(1, 2 P(X <= the smaller)), X binomial over both with probability 1/2."""
    count, fewer = only_base + only_other, min(only_base, only_other)
    # In integers: 2 ** count overflows a float for large counts.
    tail = sum(math.comb(count, k) for k in range(fewer + 1))
    return min(1.0, float(Fraction(2 * tail, 2**count)))


def _compare(task: str, metric: Metric, base: Items, other: Items, alpha: float) -> Difference:
    shared = [key for key in base if key in other]
    if not shared:
        raise SpilloverError(f"the two results have no item of {task} in common")
    first, second = metric.sums([base[key] for key in shared]), metric.sums([other[key] for key in shared])
    was, now = (float(metric.shaped(over.sum() / per.sum())) for over, per in (first, second))
    only_base: int | None = None
    only_other: int | None = None
    samples = metric.shaped(resampled(*first, *second))  # [2, RESAMPLES]
    moved = samples[1] - samples[0]
    each = [metric.slope(float(over.sum() / per.sum())) * influence(over, per) for over, per in (first, second)]
    influences = each[1] - each[0]  # contribution of each pair to the difference, relative to the mean
    reach = student_reach(influences, 1 - alpha)
    low, high = (float(end) for end in np.quantile(moved, [alpha / 2, 1 - alpha / 2]))
    low, high = min(low, now - was - reach), max(high, now - was + reach)
    if metric.kind == "mean" and is_share(*first) and is_share(*second):
        only_base, only_other = int(np.sum(first[0] > second[0])), int(np.sum(first[0] < second[0]))
        p, test = mcnemar(only_base, only_other), "McNemar exact"
    else:
        p, test = max(_bootstrap_p(moved), _student_p(now - was, influences)), "paired bootstrap"
    good = (now > was) == (metric.better == "higher")
    verdict = NO_DIFFERENCE if p >= alpha or now == was else BETTER if good else WORSE
    return Difference(task, metric.name, was, now, low, high, p, len(shared), only_base, only_other, test, verdict)


def _bootstrap_p(moved: Floats) -> float:
    """Return twice the share of samples whose sign differs from that of the majority; never 0."""
    least = min(int(np.sum(moved <= 0)), int(np.sum(moved >= 0)))
    return min(1.0, 2 * (least + 1) / (RESAMPLES + 1))


def _student_p(difference: float, influences: Floats) -> float:
    """Return the two-sided p value of a difference, given the contribution of each pair."""
    if len(influences) < 2 or difference == 0:
        return 1.0
    error = float(influences.std(ddof=1)) / math.sqrt(len(influences))
    return 1.0 - student_within(abs(difference) / error, len(influences) - 1) if error > 0 else 0.0
