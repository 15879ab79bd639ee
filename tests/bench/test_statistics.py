"""Summaries agree with what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from spillover.bench.statistics import median_interval, percentiles


def test_percentiles_interpolate() -> None:
    assert percentiles([1, 2, 3, 4, 5], [0, 50, 75, 100]) == {0: 1.0, 50: 3.0, 75: 4.0, 100: 5.0}


def test_the_interval_holds_the_median_and_shrinks_with_more_values() -> None:
    rng = np.random.default_rng(0)
    few, many = (median_interval(rng.normal(10, 1, size=size).tolist()) for size in (10, 1000))
    for interval in (few, many):
        assert interval.low <= interval.median <= interval.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    intervals = [median_interval(rng.exponential(1, size=40).tolist(), resamples=400) for _ in range(200)]
    covered = sum(interval.low <= np.log(2) <= interval.high for interval in intervals)
    assert 0.88 <= covered / 200 <= 0.99


def test_one_value_has_no_spread_and_none_is_refused() -> None:
    interval = median_interval([3.0])
    assert (interval.low, interval.median, interval.high) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
