"""Summaries of repeated measurements. Percentiles interpolate linearly, as numpy and vLLM do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    blocks = _block_logs(values, base, block)
    count = blocks.size
    if count == 1:
        return Ratio(math.exp(blocks[0]), None, None, 1, confidence)
    rng = np.random.default_rng(seed)
    means = rng.choice(blocks, size=(resamples, count)).mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    reach = student_quantile(1 - tail, count - 1) * float(blocks.std(ddof=1)) / math.sqrt(count)
    middle = float(blocks.mean())
    return Ratio(math.exp(middle), math.exp(min(low, middle - reach)), math.exp(max(high, middle + reach)), count,
                 confidence)


def block_ratios(values: Sequence[float], base: Sequence[float], block: int = 1) -> list[float]:
    """What `paired_ratio` is the geometric mean of, one a block."""
    return [math.exp(each) for each in _block_logs(values, base, block)]


def paired_p(values: Sequence[float], base: Sequence[float], block: int = 1) -> float | None:
    """How often blocks of two equal things would differ by as much as these, by Student's test of the logarithms; None
    for a single block, which says nothing about chance."""
    blocks = _block_logs(values, base, block)
    if blocks.size == 1:
        return None
    spread = float(blocks.std(ddof=1)) / math.sqrt(blocks.size)
    middle = abs(float(blocks.mean()))
    if spread == 0:
        return 1.0 if middle == 0 else 0.0
    return 1 - _student_within(middle / spread, blocks.size - 1)


def _block_logs(values: Sequence[float], base: Sequence[float], block: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    if len(values) != len(base) or not values:
        raise ValueError(f"{len(values)} values do not pair with {len(base)}")
    logs = np.log(np.asarray(values, dtype=float) / np.asarray(base, dtype=float))
    return np.array([logs[start : start + block].mean() for start in range(0, logs.size, block)])


def student_quantile(share: float, freedom: int) -> float:
    """Of Student's distribution, for shares of a half and more."""
    low, high = 0.0, 1.0
    while _student_within(high, freedom) < 2 * share - 1:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < 2 * share - 1 else (low, middle)
    return high


def _student_within(t: float, freedom: int) -> float:
    """P(|T| <= t): the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
