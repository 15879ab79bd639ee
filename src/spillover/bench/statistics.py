"""Summaries of repeated measurements. Percentiles interpolate linearly, as in numpy and vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

PERCENTILES = (10, 25, 50, 75, 90, 99)  # the ranks of `vllm bench latency`


@dataclass(frozen=True)
class Interval:
    """A median and the range that contains it with the given confidence."""

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
    """Return the percentile bootstrap interval of the median; for one value, that value."""
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
    """Ratio of two quantities: the geometric mean over `count` blocks of pairs, and the range that contains it with the
    given confidence. A single block gives no range."""

    value: float
    low: float | None
    high: float | None
    count: int
    confidence: float = 0.95

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def paired_ratio(values: Sequence[float], base: Sequence[float], block: int = 1, confidence: float = 0.95,
                 resamples: int = 5000, seed: int = 0) -> Ratio:
    """Return the ratio of each value to the base measured next to it, so that drift of the machine affects both.

    `block` consecutive pairs count as one, such as two that were measured in opposite order. The range is the wider of
    a percentile bootstrap over blocks and Student's interval: the first is too narrow for few blocks.
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
    """Return the ratios of which `paired_ratio` is the geometric mean, one per block."""
    ratios: list[float] = np.exp(_block_logs(values, base, block)).tolist()
    return ratios


@dataclass(frozen=True)
class Sequential:
    """A ratio that may be inspected after every block, any number of times."""

    value: float
    low: float | None  # None if there are too few blocks for this confidence
    high: float | None
    count: int
    confidence: float
    p: float  # probability that equal quantities ever look as different as these, whichever block one stops at


def sequential_ratio(values: Sequence[float], base: Sequence[float], block: int = 1, confidence: float = 0.95,
                     first: int = 2) -> Sequential:
    """Return an anytime-valid confidence sequence of the ratio, from block `first` on.

    The intervals for all numbers of blocks contain the true ratio simultaneously with the given confidence, so a run
    may stop at whichever block decides it. Logarithms of block ratios are assumed normal with unknown variance; the
    bound is a mixture of t tests (Lai 1976, Wang and Ramdas 2023), whose closed form is in `_reach`. As all intervals
    hold simultaneously, so does their intersection, which is returned.
    """
    logs = _block_logs(values, base, block)
    count = np.arange(1, logs.size + 1)
    moved = logs - logs[0]  # exact zeros if all blocks are equal
    mean = np.cumsum(moved) / count
    squares = np.maximum(np.cumsum(moved**2) - count * mean**2, 0.0)  # sum of squares about the mean
    mean += logs[0]
    looked = count >= max(first, least_blocks(confidence))
    reach = np.sqrt(squares[looked] * np.array([_reach(int(n), confidence) for n in count[looked]]))
    lows, highs = mean[looked] - reach, mean[looked] + reach
    low = high = None
    if lows.size:
        low, high = float(lows.max()), float(highs.min())
        if not low <= mean[-1] <= high:  # e.g. if a machine changes midway: the last interval is valid too
            low, high = float(lows[-1]), float(highs[-1])
    return Sequential(math.exp(float(mean[-1])), None if low is None else math.exp(low),
                      None if high is None else math.exp(high), logs.size, confidence, _sequential_p(mean, squares))


@lru_cache(maxsize=1_000)
def least_blocks(confidence: float) -> int:
    """Return the smallest number of blocks for which a confidence sequence has a finite interval."""
    return next(n for n in range(2, 10_000) if math.isfinite(_reach(n, confidence)))


def blocks_to_decide(ratio: float, spread: float, confidence: float, margin: float, most: int) -> int:
    """Estimate the number of blocks until an interval excludes 1 or is within `margin` of it, if `ratio` and the
    standard deviation `spread` of the blocks' logarithms are the true ones; `most` if that is not enough."""
    away, room = abs(math.log(ratio)), math.log1p(margin)
    for n in range(2, most):
        reach = math.sqrt((n - 1) * _reach(n, confidence)) * spread
        if reach < away or away + reach < room:
            return n
    return most


SHRINK = 0.1  # differences of about 1 / sqrt(SHRINK), 3 standard deviations of a block, are decided soonest


@lru_cache(maxsize=10_000)
def _reach(count: int, confidence: float) -> float:
    """Return the squared half width of an interval over the sum of squares about the mean; infinite for few blocks.

    With n blocks of mean m and sum of squares S, r = SHRINK / (n + SHRINK) and d = m - u, the evidence against a true
    mean of u is sqrt(r) * ((S + n d^2) / (S + r n d^2)) ** (n / 2): the likelihood ratio of a t test, mixed over
    differences. If u is true, it exceeds 1 / alpha at any n with a probability of at most alpha.
    """
    shrunk = SHRINK / (count + SHRINK)
    power = -2 / count * (math.log1p(-confidence) + 0.5 * math.log(shrunk))
    if power + math.log(shrunk) >= 0:
        return math.inf
    bound = math.exp(power)
    return (bound - 1) / (count * (1 - bound * shrunk))


def _sequential_p(mean: np.ndarray[Any, np.dtype[np.float64]], squares: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    count = np.arange(1, mean.size + 1)
    shrunk = SHRINK / (count + SHRINK)
    far = count * mean**2
    share = np.divide(squares + far, squares + shrunk * far, out=np.ones_like(far), where=far > 0)
    evidence = 0.5 * np.log(shrunk) + count / 2 * np.log(share)
    return float(min(1.0, math.exp(-min(700.0, float(evidence.max())))))


def _block_logs(values: Sequence[float], base: Sequence[float], block: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    if len(values) != len(base) or not values:
        raise ValueError(f"{len(values)} values do not pair with {len(base)}")
    logs = np.log(np.asarray(values, dtype=float) / np.asarray(base, dtype=float))
    if logs.size % block:  # the last block is incomplete
        return np.array([logs[start : start + block].mean() for start in range(0, logs.size, block)])
    means: np.ndarray[Any, np.dtype[np.float64]] = logs.reshape(-1, block).mean(axis=1)
    return means


def student_quantile(share: float, freedom: int) -> float:
    """Return a quantile of Student's distribution, for shares of at least one half."""
    low, high = 0.0, 1.0
    while student_within(high, freedom) < 2 * share - 1:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, freedom) < 2 * share - 1 else (low, middle)
    return high


def student_within(t: float, freedom: int) -> float:
    """Return P(|T| <= t) by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
