"""Equal things are rarely told apart, a difference of 5% is found, and words agree with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_lab import FakeLoad, experiment

from spillover.bench.statistics import block_ratios, paired_p, student_quantile
from spillover.lab.analysis import analysis_of
from spillover.lab.experiment import BLOCKS, CONFIDENCE
from spillover.lab.run import run_experiment
from spillover.lab.run_metrics import metric_names
from spillover.lab.verdict import FASTER, NO_DIFFERENCE, NO_VERDICT, SLOWER, Comparison, Verdict, better, decide


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _file: None)


def comparison(values: list[float], base: list[float], metric: str = "output_throughput", primary: bool = True,
               block: int = 1, **changes: Any) -> Comparison:
    return Comparison("w", changes.pop("arm", "arm"), "base", metric, primary, tuple(values), tuple(base), block,
                      **changes)


def noisy(rng: np.random.Generator, ratio: float = 1.0, unrest: float = 0.025, blocks: int = BLOCKS) -> Comparison:
    """An experiment of ABBA blocks on a machine that also drifts."""
    drift = np.cumsum(rng.normal(0, 0.01, size=2 * blocks))
    base, values = (np.exp(drift + rng.normal(0, unrest, size=2 * blocks)) for _ in range(2))
    return comparison((ratio * values).tolist(), base.tolist(), block=2)


def one(made: Comparison) -> Verdict:
    return decide([made], CONFIDENCE, 3)[0]


def analysed(folder: Path, seed: int, **arm_b: Any) -> dict[str, Any]:
    made = experiment(arms={"a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": arm_b}})
    return dict(analysis_of(run_experiment(made, folder, FakeLoad(seed).bench())))


def test_the_same_engine_twice_shows_no_difference_in_19_of_20_experiments(tmp_path: Path) -> None:
    """Whole experiments with default settings: none of their verdicts, secondary ones included, may cry wolf."""
    quiet = 0
    for seed in range(20):
        verdicts = analysed(tmp_path / str(seed), seed)["verdicts"]
        assert len(verdicts) == 3
        assert {verdict["why"] for verdict in verdicts} == {None}
        quiet += all(verdict["verdict"] == NO_DIFFERENCE for verdict in verdicts)
    assert quiet >= 19


def test_a_slowdown_of_five_percent_is_found(tmp_path: Path) -> None:
    for seed in range(5):
        analysis = analysed(tmp_path / str(seed), seed, slowdown=1.05)
        verdict = next(each for each in analysis["verdicts"] if each["primary"])
        assert verdict["verdict"] == SLOWER, verdict["text"]
        assert verdict["low"] < 1 / 1.05 < verdict["high"] < 1


def test_over_many_experiments_false_alarms_and_misses_are_as_rare_as_said() -> None:
    rng = np.random.default_rng(0)
    alarms = sum(one(noisy(rng)).verdict != NO_DIFFERENCE for _ in range(600))
    assert alarms <= 15  # 6 are expected at 99%
    found = sum(one(noisy(rng, ratio=1 / 1.05)).verdict == SLOWER for _ in range(200))
    assert found >= 180


def test_the_verdict_says_what_its_interval_says() -> None:
    rng = np.random.default_rng(1)
    for ratio in (0.8, 0.95, 1.0, 1.02, 1.3):
        verdict = one(noisy(rng, ratio))
        assert verdict.low is not None
        assert verdict.high is not None
        assert verdict.low <= (verdict.ratio or 0) <= verdict.high
        assert verdict.verdict == (FASTER if verdict.low > 1 else SLOWER if verdict.high < 1 else NO_DIFFERENCE)


def test_lower_is_better_for_times() -> None:
    base = [100.0, 101, 99, 100, 102]
    halved = [value / 2 + 0.1 * index for index, value in enumerate(base)]
    assert one(comparison(halved, base, "median_ttft_ms")).verdict == FASTER
    assert one(comparison(halved, base, "output_throughput")).verdict == SLOWER
    assert "1.99x faster" in one(comparison(halved, base, "median_ttft_ms")).text


def test_every_metric_that_can_be_named_has_its_direction() -> None:
    higher = {"completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
              "total_token_throughput", "request_goodput", "slo_attainment", "max_output_tokens_per_s", "hit_rate"}
    lower = {"duration", "failed", "max_concurrent_requests", "mean_concurrent_requests"}
    named = metric_names({"ttft": 500})
    assert {name for name in named if not name.endswith("_ms")} == higher | lower
    assert {name for name in named if better(name) == "higher"} == higher


def test_more_comparisons_need_more_evidence() -> None:
    """Among twenty arms that are all the same, one that is a little lucky is no discovery; alone it would be."""
    lucky = comparison([1.06, 1.07, 1.10, 1.05, 1.03, 1.08, 1.02, 1.09], [1.0] * 8)
    rng = np.random.default_rng(2)
    crowd = [noisy(rng) for _ in range(200)]
    assert one(lucky).verdict == FASTER
    among = decide([lucky, *crowd], CONFIDENCE, 3)
    assert among[0].confidence == pytest.approx(1 - 0.01 / 201)
    assert among[0].low is not None
    assert one(lucky).low is not None
    assert among[0].low < (one(lucky).low or 0)
    assert all(verdict.verdict == NO_DIFFERENCE for verdict in among[1:])


def test_holm_lets_strong_evidence_make_room_for_the_next() -> None:
    strong = comparison([2.0, 2.01, 1.99, 2.0], [1.0] * 4, arm="strong")
    weak = comparison([1.0, 1.2, 0.9, 1.1], [1.0] * 4, arm="weak")
    weak_verdict, strong_verdict = decide([weak, strong], 0.99, 3)
    assert strong_verdict.verdict == FASTER
    assert strong_verdict.confidence == pytest.approx(1 - 0.01 / 2)
    assert weak_verdict.verdict == NO_DIFFERENCE
    assert weak_verdict.confidence == pytest.approx(0.99)


def test_after_one_failure_the_rest_fail_with_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        verdicts = sorted(decide([noisy(rng, 1 + 0.01 * step) for step in range(6)], 0.99, 3),
                          key=lambda verdict: verdict.p or 0)
        shown = [verdict.verdict == NO_DIFFERENCE for verdict in verdicts]
        assert shown == sorted(shown)  # no discovery behind a failure
        for verdict in verdicts:
            assert ((verdict.low or 0) <= 1 <= (verdict.high or 0)) == (verdict.verdict == NO_DIFFERENCE)


def test_secondary_metrics_take_nothing_from_the_primary_one() -> None:
    rng = np.random.default_rng(4)
    primary = noisy(rng, 0.94)
    alone, beside = one(primary), decide([primary, *(comparison([1.0, 1.1, 0.9], [1.0] * 3, f"m{n}", False)
                                                     for n in range(50))], CONFIDENCE, 3)[0]
    assert (alone.low, alone.high, alone.verdict) == (beside.low, beside.high, beside.verdict)


def test_few_blocks_zeros_and_invalid_arms_get_no_verdict() -> None:
    few = one(comparison([2.0, 2.0], [1.0, 1.01]))
    assert (few.verdict, few.why) == (NO_VERDICT, "2 blocks, and at least 3 are needed")
    assert few.ratio == pytest.approx(1.99, abs=0.01)  # told, not judged
    assert (few.low, few.high, few.confidence) == (None, None, None)
    zero = one(comparison([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], "request_goodput"))
    assert "was 0 or missing" in (zero.why or "")
    assert "no block" in (one(comparison([], [])).why or "")
    barred = one(comparison([2.0, 2.01, 1.99, 2.0], [1.0] * 4, barred="arm is not valid: errors"))
    assert (barred.verdict, barred.why) == (NO_VERDICT, "arm is not valid: errors")
    assert "no verdict: arm is not valid" in barred.text


def test_students_quantiles_are_those_of_the_tables() -> None:
    table = {(1, 0.975): 12.7062, (2, 0.975): 4.3027, (3, 0.9995): 12.9240, (5, 0.995): 4.0321, (7, 0.995): 3.4995,
             (8, 0.9995): 5.0413, (30, 0.975): 2.0423}
    for (freedom, share), quantile in table.items():
        assert student_quantile(share, freedom) == pytest.approx(quantile, abs=1e-4)


def test_p_is_small_where_blocks_agree_and_one_where_they_are_equal() -> None:
    assert paired_p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert paired_p([2.0, 2.0], [1.0, 1.0]) == 0.0
    assert paired_p([2.0], [1.0]) is None
    p = paired_p([1.1, 0.95, 1.02, 0.99], [1.0] * 4)
    assert p is not None
    assert 0.3 < p < 0.9
    assert block_ratios([2.0, 8.0, 3.0, 3.0], [1.0] * 4, 2) == pytest.approx([4.0, 3.0])
