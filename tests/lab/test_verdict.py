"""Experiments that run until they are decided are seldom wrong, however often they check; words agree with numbers.

Simulated runs vary by 2.5%, and a slow walk is shared by all arms; two ABBA pairs make a block, so that block ratios
vary by 2.5% as well. That is a quiet machine: benchmarks/lab_stopping.py has other spreads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spillover.bench.records import ClientHealth
from spillover.bench.statistics import block_ratios, blocks_to_decide, least_blocks, sequential_ratio, student_quantile
from spillover.lab.analysis import analysis_of
from spillover.lab.experiment import CONFIDENCE, EQUIVALENCE, MAX_BLOCKS, MINIMUM_BLOCKS
from spillover.lab.run import run_experiment
from spillover.lab.run_metrics import metric_names
from spillover.lab.store import Results
from spillover.lab.verdict import (
    FASTER,
    NO_DIFFERENCE,
    NO_VERDICT,
    SAME,
    SLOWER,
    Comparison,
    Rule,
    Verdict,
    better,
    decide,
)
from support.lab.fake_lab import FakeLoad, experiment

RULE = Rule(CONFIDENCE, MINIMUM_BLOCKS, EQUIVALENCE)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _file: None)


def comparison(values: list[float], base: list[float], metric: str = "output_throughput", primary: bool = True,
               block: int = 1, **changes: Any) -> Comparison:
    return Comparison("w", changes.pop("arm", "arm"), "base", metric, primary, tuple(values), tuple(base), block,
                      **changes)


def noisy(rng: np.random.Generator, ratio: float = 1.0, unrest: float = 0.025, blocks: int = 10) -> Comparison:
    """Return an experiment of ABBA blocks on a machine that also drifts."""
    drift = np.cumsum(rng.normal(0, 0.01, size=2 * blocks))
    base, values = (np.exp(drift + rng.normal(0, unrest, size=2 * blocks)) for _ in range(2))
    return comparison((ratio * values).tolist(), base.tolist(), block=2)


def first_blocks(made: Comparison, blocks: int) -> Comparison:
    return replace(made, values=made.values[: made.block * blocks], base=made.base[: made.block * blocks])


def until_decided(together: list[Comparison], rule: Rule = RULE, most: int = MAX_BLOCKS) -> list[Verdict]:
    """Decide after every block, as an experiment does, and stop when all comparisons are decided."""
    for blocks in range(rule.minimum_blocks, most + 1):
        verdicts = decide([first_blocks(made, blocks) for made in together], rule)
        if all(verdict.final for verdict in verdicts):
            break
    return verdicts


def one(made: Comparison) -> Verdict:
    return decide([made], RULE)[0]


def analysed(folder: Path, seed: int, unrest: float = 0.025, **arm_b: Any) -> dict[str, Any]:
    made = experiment(arms={"a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": arm_b}})
    return dict(analysis_of(run_experiment(made, folder, FakeLoad(seed, unrest).bench())))


def test_equal_arms_end_in_same_in_nineteen_experiments_of_twenty() -> None:
    """With default settings one in a hundred may end in faster or slower; hardly any stays undecided."""
    rng = np.random.default_rng(0)
    ends = [until_decided([noisy(rng, blocks=MAX_BLOCKS)])[0].verdict for _ in range(200)]
    assert sum(verdict in (FASTER, SLOWER) for verdict in ends) <= 4  # 2 are allowed on average
    assert ends.count(SAME) >= 190


def test_a_true_difference_of_five_percent_is_found_in_nineteen_experiments_of_twenty() -> None:
    rng = np.random.default_rng(1)
    ends = [until_decided([noisy(rng, 1 / 1.05, blocks=MAX_BLOCKS)])[0] for _ in range(200)]
    assert sum(end.verdict == SLOWER for end in ends) >= 190
    assert float(np.median([end.blocks for end in ends])) <= 10


@pytest.mark.parametrize("ratio", [1.02, 1 / 1.02])
def test_same_within_two_percent_is_right_wherever_it_is_said(ratio: float) -> None:
    """The verdict is right at the margin itself, where it is hardest, and beyond."""
    rng = np.random.default_rng(2)
    ends = [until_decided([noisy(rng, ratio, blocks=MAX_BLOCKS)])[0].verdict for _ in range(200)]
    assert ends.count(SAME) <= 4
    within = [until_decided([noisy(rng, 1 + (ratio - 1) / 2, unrest=0.015, blocks=MAX_BLOCKS)])[0].verdict
              for _ in range(20)]
    assert within.count(SAME) + within.count(FASTER if ratio > 1 else SLOWER) == 20


def test_six_equal_comparisons_together_are_as_seldom_wrong_as_one() -> None:
    rng = np.random.default_rng(3)
    wrong = sum(any(verdict.verdict in (FASTER, SLOWER)
                    for verdict in until_decided([noisy(rng, blocks=16) for _ in range(6)], most=16))
                for _ in range(100))
    assert wrong <= 3


@pytest.mark.parametrize("tail", ["heavy", "outliers", "drift"])
def test_blocks_that_are_not_normal_are_judged_as_carefully(tail: str) -> None:
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(200):
        noise = {"heavy": 0.02 * rng.standard_t(2, size=(2, 60)),
                 "outliers": rng.normal(0, 0.02, size=(2, 60)) + 0.2 * (rng.random(size=(2, 60)) < 0.05),
                 "drift": rng.normal(0, 0.025, size=(2, 60))}[tail]
        if tail == "drift":  # the machine loses half its speed; each arm runs early and late in a block equally often
            noise += np.linspace(0, -0.7, 120).reshape(60, 2)[:, ::-1].T
            noise[:, 1::2] = noise[::-1, 1::2]
        made = comparison(np.exp(noise[0]).tolist(), np.exp(noise[1]).tolist(), block=2)
        wrong += until_decided([made], most=30)[0].verdict in (FASTER, SLOWER)
    assert wrong <= 6


def test_a_large_difference_on_a_noisy_machine_is_decided_after_a_few_more_blocks() -> None:
    """Four blocks of 5.8x that vary by 75% leave 0.55x to 61x open; more blocks decide it."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        made = comparison((5.8 * rng.lognormal(0, 0.75, size=MAX_BLOCKS)).tolist(), [1.0] * MAX_BLOCKS)
        verdict = until_decided([made])[0]
        assert verdict.verdict == FASTER
        assert verdict.blocks <= 20


def test_whole_experiments_stop_by_themselves_and_are_right(tmp_path: Path) -> None:
    for seed in range(2):
        same = analysed(tmp_path / f"same-{seed}", seed, unrest=0.008)
        assert (same["verdicts"][0]["verdict"], same["stopped"]["reason"]) == (SAME, "decided")
        assert {verdict["verdict"] for verdict in same["verdicts"]} <= {SAME, NO_DIFFERENCE}
        slower = analysed(tmp_path / f"slower-{seed}", seed, slowdown=1.05)
        verdict = next(each for each in slower["verdicts"] if each["primary"])
        assert (verdict["verdict"], slower["stopped"]["reason"]) == (SLOWER, "decided"), verdict["text"]
        assert verdict["low"] < 1 / 1.05 < verdict["high"] < 1
        assert slower["blocks"] == verdict["blocks"] < 30
        assert slower["stopped"]["text"].startswith(f"Stopped after {slower['blocks']} blocks: every comparison")


def test_an_experiment_stops_at_its_limits_and_goes_on_when_they_are_raised(tmp_path: Path) -> None:
    made = experiment(max_blocks=5)
    cut = analysis_of(run_experiment(made, tmp_path / "r", FakeLoad(0, unrest=0.2).bench()))
    assert (cut["blocks"], cut["stopped"]["reason"]) == (5, "max-blocks")
    assert cut["verdicts"][0]["verdict"] == NO_DIFFERENCE
    assert "no difference shown, undecided after 5 blocks" in cut["headline"][0]
    hurried = replace(made, max_blocks=40, time_limit=1e-9)  # no block would complete in time
    late = analysis_of(run_experiment(hurried, tmp_path / "r", FakeLoad(1, unrest=0.2).bench()))
    assert (late["blocks"], late["stopped"]["reason"]) == (5, "time-limit")
    assert "the same command continues" in late["stopped"]["text"]
    further = replace(made, max_blocks=8)
    results = run_experiment(further, tmp_path / "r", FakeLoad(2, unrest=0.2).bench())
    assert (analysis_of(results)["blocks"], len(results.visits)) == (8, 32)
    fresh = analysis_of(run_experiment(hurried, tmp_path / "new", FakeLoad(1, unrest=0.2).bench()))
    assert fresh["blocks"] == MINIMUM_BLOCKS  # whatever the limit is


def test_what_is_decided_is_not_run_again(tmp_path: Path) -> None:
    made = experiment(arms={"a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": {"slowdown": 2}}})
    run_experiment(made, tmp_path / "r", FakeLoad().bench())
    blocks, again = len(Results.open(tmp_path / "r").visits) // 4, FakeLoad()
    run_experiment(made, tmp_path / "r", again.bench())
    assert again.measured == []
    assert blocks <= 6


def test_somebody_elses_question_ends_it_in_place_of_its_own_verdicts(tmp_path: Path) -> None:
    made = experiment(arms={"a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": {"slowdown": 2}}})
    blocks = len(run_experiment(made, tmp_path / "own", FakeLoad().bench()).visits) // 4

    def asking(visits: int, folder: str) -> Results:
        return run_experiment(made, tmp_path / folder, FakeLoad().bench(),
                              stop_rule=lambda results: len(results.visits) >= visits)

    early = asking(0, "early")
    assert len(early.visits) // 4 == made.minimum_blocks < blocks
    assert analysis_of(early)["stopped"]["reason"] == "answered"
    late = asking(4 * (blocks + 2), "late")
    assert len(late.visits) // 4 == blocks + 2
    again = FakeLoad()
    run_experiment(made, tmp_path / "late", again.bench(), stop_rule=lambda _results: True)
    assert again.measured == []


def test_nothing_is_begun_after_a_deadline_and_what_was_measured_goes_on(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment(arms={"a": {"engine": "spillover"}, "b": {"engine": "spillover", "args": {"slowdown": 2}}})
    for runs in (0, 3):
        load = FakeLoad()
        with monkeypatch.context() as patched:  # a clock that counts runs
            patched.setattr("spillover.lab.run.time.monotonic", lambda load=load: float(len(load.measured)))
            cut = run_experiment(made, tmp_path / "r", load.bench(), deadline=float(runs))
        assert len(load.measured) == runs  # fewer than the blocks that a verdict takes
        assert analysis_of(cut)["stopped"]["reason"] == "time-limit"
    assert analysis_of(run_experiment(made, tmp_path / "r", FakeLoad().bench()))["stopped"]["reason"] == "decided"


def test_runs_that_a_busy_moment_disturbed_are_left_out_while_they_are_rare(tmp_path: Path) -> None:
    def measured(share: float) -> dict[str, Any]:
        load, count = FakeLoad(3), [0]
        measure = load.measure

        def sometimes_busy(*arguments: Any) -> Any:
            found, count[0] = measure(*arguments), count[0] + 1
            if load.measured[-1][1] != "1" and count[0] % round(1 / share) == 0:
                found = replace(found, run=replace(found.run, client=ClientHealth(saturated="sent 80 ms late")))
            return found

        load.measure = sometimes_busy  # type: ignore[method-assign]
        made = experiment(retries=0, arms={"a": {"engine": "spillover"},
                                           "b": {"engine": "spillover", "args": {"slowdown": 1.1}}})
        return dict(analysis_of(run_experiment(made, tmp_path / str(share), load.bench())))

    rare = measured(1 / 7)
    verdict = next(each for each in rare["verdicts"] if each["primary"])
    assert verdict["verdict"] == SLOWER, verdict["text"]
    assert verdict["blocks"] < rare["blocks"]
    notes = [note for cell in rare["cells"] for note in cell["notes"]]
    assert any("whose blocks are left out" in note["reason"] for note in notes)
    often = measured(1)
    assert {each["verdict"] for each in often["verdicts"]} == {NO_VERDICT}


def test_the_verdict_says_what_its_interval_says() -> None:
    rng = np.random.default_rng(1)
    for ratio in (0.8, 0.95, 1.0, 1.02, 1.3):
        verdict = one(noisy(rng, ratio))
        assert verdict.low is not None
        assert verdict.high is not None
        assert verdict.low <= (verdict.ratio or 0) <= verdict.high
        same = verdict.low > 1 / 1.02 and verdict.high < 1.02
        assert verdict.verdict == (SAME if same else FASTER if verdict.low > 1 else SLOWER if verdict.high < 1
                                   else NO_DIFFERENCE)


def test_the_same_is_said_by_its_margin_and_can_be_turned_off() -> None:
    made = noisy(np.random.default_rng(7), 1.004, unrest=0.004, blocks=20)
    assert one(made).verdict == SAME
    assert "same within 2% after 20 blocks (" in one(made).text
    assert decide([made], Rule(CONFIDENCE, 3, 0.05))[0].word == "same within 5%"
    assert decide([made], Rule(CONFIDENCE, 3, 0.0))[0].verdict in (NO_DIFFERENCE, FASTER)
    assert not decide([first_blocks(made, 3)], RULE)[0].final


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
    """Among two hundred equal arms, one that is slightly lucky is no discovery; alone it would be."""
    lucky = comparison([1.06, 1.07, 1.10, 1.05, 1.03, 1.08, 1.02, 1.09], [1.0] * 8)
    rng = np.random.default_rng(2)
    among = decide([lucky, *(noisy(rng) for _ in range(200))], RULE)
    alone = one(lucky)
    assert alone.verdict == FASTER
    assert among[0].confidence == pytest.approx(1 - 0.01 / 201)
    assert (among[0].low or 0) < (alone.low or 0)
    assert all(verdict.verdict not in (FASTER, SLOWER) for verdict in among[1:])


def test_what_an_arm_that_is_not_valid_measured_takes_nothing_from_the_others() -> None:
    rng = np.random.default_rng(6)
    good, bad = noisy(rng, 1.1), comparison([2.0] * 6, [1.0] * 6, no_verdict_reason="arm is not valid: errors")
    assert decide([good, bad, bad], RULE)[0] == one(good)


def test_secondary_metrics_take_nothing_from_the_primary_one() -> None:
    rng = np.random.default_rng(4)
    primary = noisy(rng, 0.94)
    alone, program_beside = one(primary), decide([primary, *(comparison([1.0, 1.1, 0.9], [1.0] * 3, f"m{n}", False)
                                                             for n in range(50))], RULE)[0]
    assert (alone.low, alone.high, alone.verdict) == (program_beside.low, program_beside.high, program_beside.verdict)


def test_few_blocks_zeros_and_invalid_arms_get_no_verdict() -> None:
    few = one(comparison([2.0, 2.0], [1.0, 1.01]))
    assert (few.verdict, few.why) == (NO_VERDICT, "2 blocks, and at least 4 are needed")
    assert not few.final
    assert few.ratio == pytest.approx(1.99, abs=0.01)  # reported, but not judged
    assert (few.low, few.high) == (None, None)
    zero = one(comparison([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], "request_goodput"))
    assert "was 0 or missing" in (zero.why or "")
    assert "no block" in (one(comparison([], [])).why or "")
    no_verdict_reason = one(comparison([2.0, 2.01, 1.99, 2.0], [1.0] * 4, no_verdict_reason="arm is not valid: errors"))
    assert (no_verdict_reason.verdict, no_verdict_reason.why) == (NO_VERDICT, "arm is not valid: errors")
    assert "no verdict: arm is not valid" in no_verdict_reason.text
    assert zero.final
    assert no_verdict_reason.final  # more blocks would not help


def test_students_quantiles_are_those_of_the_tables() -> None:
    table = {(1, 0.975): 12.7062, (2, 0.975): 4.3027, (3, 0.9995): 12.9240, (5, 0.995): 4.0321, (7, 0.995): 3.4995,
             (8, 0.9995): 5.0413, (30, 0.975): 2.0423}
    for (freedom, share), quantile in table.items():
        assert student_quantile(share, freedom) == pytest.approx(quantile, abs=1e-4)


def test_an_interval_holds_the_truth_at_every_block_at_once() -> None:
    rng = np.random.default_rng(8)
    missed = 0
    for _ in range(300):
        logs = rng.normal(0.1, 0.03, size=20)
        found = [sequential_ratio(np.exp(logs[:n]).tolist(), [1.0] * n, confidence=0.9) for n in range(3, 21)]
        missed += any(not (each.low or 0) <= np.exp(0.1) <= (each.high or np.inf) for each in found)
    assert missed <= 30  # one in ten


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99, 1 - 0.01 / 60])
def test_too_few_blocks_have_no_interval_and_those_that_agree_a_narrow_one(confidence: float) -> None:
    least = least_blocks(confidence)
    ratios = [2.0, 2.001, 1.999, 2.0, 2.001, 2.0]
    assert sequential_ratio(ratios[: least - 1], [1.0] * (least - 1), confidence=confidence).low is None
    found = sequential_ratio(ratios[:least], [1.0] * least, confidence=confidence)
    assert found.low is not None
    assert 1.8 < found.low < 2 < (found.high or 0) < 2.2
    assert found.p < 1 - confidence


def test_p_is_small_where_blocks_agree_and_one_where_they_are_equal() -> None:
    assert sequential_ratio([1.0] * 5, [1.0] * 5).p == 1.0
    assert sequential_ratio([2.0] * 6, [1.0] * 6).p < 1e-4
    assert sequential_ratio([2.0], [1.0]).p == 1.0
    assert sequential_ratio([1.1, 0.95, 1.02, 0.99], [1.0] * 4).p > 0.5
    assert block_ratios([2.0, 8.0, 3.0, 3.0], [1.0] * 4, 2) == pytest.approx([4.0, 3.0])


def test_how_many_blocks_it_will_take_is_about_right() -> None:
    rng = np.random.default_rng(9)
    for ratio in (1.0, 1.05, 1.3):
        taken = [until_decided([noisy(rng, ratio, blocks=MAX_BLOCKS)])[0].blocks for _ in range(30)]
        guess = blocks_to_decide(ratio, 0.025, CONFIDENCE, EQUIVALENCE, MAX_BLOCKS)
        assert 0.5 * guess <= np.median(taken) <= 2 * guess
    early = one(first_blocks(noisy(rng, 1.05), 4))
    assert 0 <= early.blocks_left(MAX_BLOCKS) <= MAX_BLOCKS - 4
