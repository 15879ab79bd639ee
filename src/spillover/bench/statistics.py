"""Summaries of repeated measurements. Percentiles interpolate linearly, as numpy and vLLM do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

PERCENTILES = (10, 25, 50, 75, 90, 99)  # those of `vllm bench latency`


@dataclass(frozen=True)
class Interval:
    """A median and the range that holds it with the given confidence."""

    median: float
    low: float
    high: float
    confidence: float = 0.95

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def percentiles(values: Sequence[float], ranks: Sequence[int] = PERCENTILES) -> dict[int, float]:
    return dict(zip(ranks, np.percentile(np.asarray(values, dtype=float), list(ranks)).tolist(), strict=True))


def median_interval(values: Sequence[float], confidence: float = 0.95, resamples: int = 2000,
                    seed: int = 0) -> Interval:
    """Percentile bootstrap of the median. With one value the range is that value: nothing is known about its spread."""
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        raise ValueError("no values to summarise")
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(data, size=(resamples, data.size)), axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(data)), float(low), float(high), confidence)


@dataclass(frozen=True)
class Ratio:
    """How many times one thing is another: the geometric mean over `count` blocks of pairs, and the range that holds it
    with the given confidence. One block says nothing about a range."""

    value: float
    low: float | None
    high: float | None
    count: int
    confidence: float = 0.95

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def paired_ratio(values: Sequence[float], base: Sequence[float], block: int = 1, confidence: float = 0.95,
                 resamples: int = 5000, seed: int = 0) -> Ratio:
    """Each value over the base that was measured beside it, so that a machine whose speed drifts changes both alike.

    `block` consecutive pairs count as one, such as two that were taken in opposite order. The range is the wider of a
    percentile bootstrap over blocks and Student's interval: the first is too narrow for few blocks.
    """
    if len(values) != len(base) or not values:
        raise ValueError(f"{len(values)} values do not pair with {len(base)}")
    logs = np.log(np.asarray(values, dtype=float) / np.asarray(base, dtype=float))
    blocks = np.array([logs[start : start + block].mean() for start in range(0, logs.size, block)])
    count = blocks.size
    if count == 1:
        return Ratio(math.exp(blocks[0]), None, None, 1, confidence)
    rng = np.random.default_rng(seed)
    means = rng.choice(blocks, size=(resamples, count)).mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    reach = _student(1 - tail, count - 1) * float(blocks.std(ddof=1)) / math.sqrt(count)
    middle = float(blocks.mean())
    return Ratio(math.exp(middle), math.exp(min(low, middle - reach)), math.exp(max(high, middle + reach)), count,
                 confidence)


def _student(share: float, freedom: int) -> float:
    """A quantile of Student's distribution; from 3 degrees of freedom on by the expansion around the normal one, which
    is then within 1%."""
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        centred = 2 * share - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(share)
    return (z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3))
