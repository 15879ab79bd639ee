"""Metrics of a task: each is a ratio of sums over items, with an interval for the value that infinitely many items of
the same kind would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from spillover.bench.statistics import student_quantile

CONFIDENCE = 0.95
RESAMPLES = 10_000
CHUNK = 2_000_000  # maximum number of drawn indices in memory

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A metric of a task. `over` and `per` name values of an item; `per` None counts every item once."""

    name: str
    over: str
    per: str | None = None
    better: str = "higher"  # or "lower"
    kind: str = "mean"  # "perplexity": exp of the negative mean; "bits": the negative mean over log 2
    compared: bool = True  # False if it duplicates another metric when two models are compared

    def shaped(self, mean: Any) -> Any:
        if self.kind == "perplexity":
            return np.exp(-mean)
        return -mean / math.log(2) if self.kind == "bits" else mean

    def slope(self, mean: float) -> float:
        """Return the derivative of `shaped` with respect to the mean."""
        if self.kind == "perplexity":
            return -math.exp(-mean)
        return -1 / math.log(2) if self.kind == "bits" else 1.0

    def sums(self, items: Sequence[Mapping[str, float]]) -> tuple[Floats, Floats]:
        """Return the values summed in the numerator and in the denominator, one entry per item."""
        return (np.array([item[self.over] for item in items], dtype=np.float64),
                np.array([1.0 if self.per is None else item[self.per] for item in items], dtype=np.float64))


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    items: int
    method: str  # "wilson" or "bootstrap"


def is_share(over: Floats, per: Floats) -> bool:
    """Return whether every item is right or wrong."""
    return bool(np.all(per == 1) and np.all((over == 0) | (over == 1)))


def estimate(metric: Metric, items: Sequence[Mapping[str, float]], confidence: float = CONFIDENCE) -> Estimate:
    """Return the metric and its interval: Wilson's for shares, otherwise the wider of a percentile bootstrap over items
    and Student's interval, as the first is too narrow for few items."""
    over, per = metric.sums(items)
    mean = float(over.sum() / per.sum())
    value = float(metric.shaped(mean))
    if metric.kind == "mean" and is_share(over, per):
        low, high = wilson(int(over.sum()), len(items), confidence)
        return Estimate(value, low, high, len(items), "wilson")
    tail = (1 - confidence) / 2
    reach = student_reach(influence(over, per), confidence)
    low, high = np.quantile(resampled(over, per), [tail, 1 - tail])
    ends = sorted(float(metric.shaped(end)) for end in (min(low, mean - reach), max(high, mean + reach)))
    return Estimate(value, ends[0], ends[1], len(items), "bootstrap")


def influence(over: Floats, per: Floats) -> Floats:
    """Return how much each item moves sum(over) / sum(per), times the number of items; their mean is 0."""
    moved: Floats = (over - over.sum() / per.sum() * per) / per.mean()
    return moved


def student_reach(moved: Floats, confidence: float) -> float:
    """Return half the width of Student's interval of a mean; infinity for one item."""
    if len(moved) < 2:
        return math.inf
    error = float(moved.std(ddof=1)) / math.sqrt(len(moved))
    return student_quantile((1 + confidence) / 2, len(moved) - 1) * error


def wilson(right: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a share."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    reach = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return middle - reach if right else 0.0, middle + reach if right < count else 1.0  # exact despite rounding


def resampled(over: Floats, per: Floats, *more: Floats, seed: int = 0) -> Floats:
    """Return sum(over) / sum(per) of RESAMPLES samples of the items, drawn with replacement, [RESAMPLES]; with a second
    pair in `more`, [2, RESAMPLES], both from the same samples."""
    rng = np.random.default_rng(seed)
    count = len(over)
    arrays = np.stack([over, per, *more])  # [2 or 4, items]
    sums = []
    step = max(1, CHUNK // count)
    for start in range(0, RESAMPLES, step):
        drawn = rng.integers(0, count, size=(min(step, RESAMPLES - start), count))
        sums.append(np.stack([array[drawn].sum(axis=1) for array in arrays]))
    totals = np.concatenate(sums, axis=1)
    ratios: Floats = totals[0::2] / totals[1::2]
    first: Floats = ratios[0]
    return ratios if more else first

