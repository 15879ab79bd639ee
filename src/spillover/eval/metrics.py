"""What a task's items add up to: a metric is a ratio of sums over items, with an interval that says how far it might be
from what endless items of the same kind would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 10_000
CHUNK = 2_000_000  # drawn indices held at once

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """`over` and `per` name values of an item; `per` None: every item counts once."""

    name: str
    over: str
    per: str | None = None
    better: str = "higher"  # or "lower"
    kind: str = "mean"  # "perplexity": exp of the negative mean; "bits": the negative mean over log 2
    compared: bool = True  # False: says of two models what another metric says already

    def shaped(self, mean: Any) -> Any:
        if self.kind == "perplexity":
            return np.exp(-mean)
        return -mean / math.log(2) if self.kind == "bits" else mean

    def sums(self, items: Sequence[Mapping[str, float]]) -> tuple[Floats, Floats]:
        """Return what is summed above and below the line, one entry an item."""
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
    """Return the metric and its interval: Wilson's for shares, else a percentile bootstrap over items."""
    over, per = metric.sums(items)
    value = float(metric.shaped(over.sum() / per.sum()))
    if metric.kind == "mean" and is_share(over, per):
        low, high = wilson(int(over.sum()), len(items), confidence)
        return Estimate(value, low, high, len(items), "wilson")
    low, high = _range(metric.shaped(resampled(over, per)), confidence)
    return Estimate(value, low, high, len(items), "bootstrap")


def wilson(right: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a share."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    reach = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return middle - reach if right else 0.0, middle + reach if right < count else 1.0  # exact where rounding is not


def resampled(over: Floats, per: Floats, *more: Floats, seed: int = 0) -> Floats:
    """Return sum(over) / sum(per) of RESAMPLES samples of the items, drawn with replacement, [RESAMPLES]; with a second
    pair in `more`, [2, RESAMPLES]: both of the same samples."""
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


def _range(values: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
