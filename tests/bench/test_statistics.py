"""Summaries agree with results computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from spillover.bench.statistics import median_interval, paired_ratio, percentiles


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


def test_a_ratio_of_pairs_does_not_see_the_drift_that_both_share() -> None:
    rng = np.random.default_rng(0)
    drift = np.exp(np.linspace(0, 1, 40))  # during the run the machine becomes almost three times as fast
    base = drift * rng.lognormal(0, 0.01, size=40)
    ratio = paired_ratio((0.99 * drift * rng.lognormal(0, 0.01, size=40)).tolist(), base.tolist(), block=2)
    assert ratio.count == 20
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 0.99 < ratio.high
    assert ratio.high - ratio.low < 0.02


def test_the_mean_of_ratios_is_geometric_and_blocks_are_means_of_theirs() -> None:
    ratio = paired_ratio([2.0, 8.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0], block=2)
    assert ratio.value == pytest.approx(8 ** 0.25)  # (2 * 4) and (1 * 1), the root of each, and the root of both
    assert ratio.count == 2
    assert paired_ratio([3.0], [2.0]).as_dict() == {"value": pytest.approx(1.5), "low": None, "high": None, "count": 1,
                                                    "confidence": 0.95}
    with pytest.raises(ValueError, match="do not pair"):
        paired_ratio([1.0], [])


@pytest.mark.parametrize(("count", "least"), [(2, 0.9), (4, 0.9), (20, 0.9)])
def test_the_range_of_a_ratio_covers_the_truth_also_for_few_pairs(count: int, least: float) -> None:
    rng = np.random.default_rng(count)
    covered = 0
    for _ in range(200):
        ratio = paired_ratio(rng.lognormal(0, 0.05, size=count).tolist(), [1.0] * count, resamples=400)
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered / 200 >= least
