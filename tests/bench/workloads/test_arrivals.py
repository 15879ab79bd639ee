"""Send times: the requested rate, the requested burstiness, and the times of a trace."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from spillover.bench.workloads.arrivals import Arrivals
from spillover.errors import SpilloverError

NONE = [None] * 4


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_rate_is_exact_and_the_gaps_are_as_bursty_as_asked(burstiness: float, seed: int) -> None:
    count = 20_000
    times = Arrivals(200.0, burstiness, seed=seed).times([None] * count)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(count / 200.0)
    assert (gaps >= 0).all()
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    assert gaps.std() / gaps.mean() == pytest.approx(0 if math.isinf(burstiness) else burstiness**-0.5, rel=0.03,
                                                     abs=1e-9)


def test_poisson_counts_vary_as_they_should() -> None:
    times = Arrivals(100.0).times([None] * 50_000)
    counts = np.bincount(np.array(times).astype(int))[:-1]
    assert counts.mean() == pytest.approx(100, rel=0.01)
    assert counts.var() == pytest.approx(100, rel=0.2)


def test_a_seed_gives_the_same_times_and_another_gives_others() -> None:
    first, again, other = (Arrivals(5.0, seed=seed).times(NONE) for seed in (7, 7, 8))
    assert first == again != other


def test_ramps_go_from_the_first_rate_to_the_last() -> None:
    for strategy, middle in (("linear", 55.0), ("exponential", math.sqrt(1000.0))):
        kind: Any = strategy
        gaps = np.diff(Arrivals(burstiness=math.inf, ramp_up=kind, ramp_up_start=10.0, ramp_up_end=100.0
                                ).times([None] * 1001))
        assert 1 / gaps[0] == pytest.approx(10.0, rel=0.02)
        assert 1 / gaps[-1] == pytest.approx(100.0, rel=0.01)
        assert 1 / gaps[499] == pytest.approx(middle, rel=0.01)


def test_kinds_of_arrival() -> None:
    assert Arrivals().times(NONE) == [0.0] * 4
    assert Arrivals().describe(NONE)["arrival"] == "burst"
    assert Arrivals(max_concurrency=2).is_closed(NONE)
    assert not Arrivals(3.0, max_concurrency=2).is_closed(NONE)
    assert Arrivals(static_batch_size=2).is_closed([0.0, 1.5, 4.0])
    assert Arrivals(static_batch_size=2).describe(NONE) == {
        "arrival": "static batches", "request_rate": "inf", "burstiness": 1.0, "max_concurrency": None,
        "static_batch_size": 2}
    trace = [0.0, 1.5, 4.0]
    assert Arrivals(max_concurrency=2).times(trace) == trace
    assert Arrivals(self_timed=False).times(trace) == [0.0] * 3
    assert Arrivals(1.0, math.inf).times(trace) == [1.0, 2.0, 3.0]
    assert Arrivals().describe(trace) == {"arrival": "trace", "request_rate": "inf", "burstiness": 1.0,
                                          "max_concurrency": None}


@pytest.mark.parametrize(("given", "said"), [
    ({"rate": 0.0}, "--request-rate"),
    ({"rate": math.nan}, "--request-rate"),
    ({"burstiness": -1.0}, "--burstiness"),
    ({"max_concurrency": 0}, "--max-concurrency"),
    ({"static_batch_size": 0}, "--static-batch-size must be"),
    ({"static_batch_size": 4, "rate": 3.0}, "determines when"),
    ({"static_batch_size": 4, "max_concurrency": 4}, "determines when"),
    ({"rate": 3.0, "ramp_up": "linear"}, "leave --request-rate out"),
    ({"ramp_up": "linear", "ramp_up_start": 5.0, "ramp_up_end": 1.0}, "--ramp-up-start-rps"),
])
def test_what_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpilloverError, match=said):
        Arrivals(**given)
