"""Detection of a server that cannot keep up with the rate of requests.

On an overloaded server requests pile up: both the number in flight and the time to first token grow for as long as the
load lasts. Under a sustainable load they fluctuate around a level.
"""

from __future__ import annotations

import math

import numpy as np

MIN_SECONDS = 5.0
MIN_SAMPLES = 30
EVERY = 1.0  # seconds between two checks
GROWTH = 2.0  # least ratio of the last quarter's mean to the second quarter's
SIGNIFICANCE = 5.0  # least ratio of a slope to its standard error; large, as neighbouring samples are correlated


class SaturationWatch:
    """A detector of saturation, fed with first tokens; a sample is (time, requests in flight, time to first token)."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._looked = 0.0
        self._verdict = False

    def note(self, at: float, running: int, first_token: float) -> None:
        self._samples.append((at, running, first_token))

    def is_saturated(self) -> bool:
        if self._verdict or len(self._samples) < MIN_SAMPLES:
            return self._verdict
        last = self._samples[-1][0]
        if last >= MIN_SECONDS and last - self._looked >= EVERY:
            self._looked = last
            self._verdict = piles_up(self._samples)
        return self._verdict


def piles_up(samples: list[tuple[float, float, float]]) -> bool:
    """Return whether requests pile up; the first quarter, in which any load ramps up, is left out."""
    kept = np.asarray(samples[len(samples) // 4:], dtype=float)
    if len(kept) < MIN_SAMPLES // 2:
        return False
    third = max(1, len(kept) // 3)
    grown = all(kept[-third:, column].mean() > GROWTH * kept[:third, column].mean() for column in (1, 2))
    return grown and all(_rises(kept[:, 0], kept[:, column]) for column in (1, 2))


def _rises(times: np.ndarray, values: np.ndarray) -> bool:
    centred = times - times.mean()
    spread = float((centred**2).sum())
    if spread == 0:
        return False
    slope = float((centred * values).sum()) / spread
    rest = values - values.mean() - slope * centred
    error = math.sqrt(float((rest**2).sum()) / max(1, len(values) - 2) / spread)
    return slope > SIGNIFICANCE * error
