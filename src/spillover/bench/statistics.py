"""Summaries of repeated measurements. Percentiles interpolate linearly, as numpy and vLLM do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
