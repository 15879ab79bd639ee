"""Expectations are checked against made-up results, for which it is known which of them hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.course.runs import CourseRun, runs_of
from spillover.course.shape import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Outcome,
    _by_ranges,
    _paired,
    _with_zeros,
    check,
    decision_rule,
)
from spillover.course.tables import Filled, filled_rows
from spillover.course.values import Series
from spillover.course.week import Expectation, Value, Week, parse_week
from spillover.lab.store import Results
from spillover.lab.validity import Fault
from support.lab.made_up_results import write_results

pytest.importorskip("pyarrow")
FOLDER = Path("nowhere")


def week_of(*expect: dict[str, Any], metrics: list[dict[str, Any]] | None = None, **engines: Any) -> Week:
    return parse_week({
        "title": "Made up", "phase": "Tests", "experiments": {"load": {"file": "experiment.yaml", "engines": engines}},
        "commands": {"latency": {"run": "bench latency"}},
        "metrics": metrics or [{"name": "Throughput", "about": "tokens", "unit": "tok/s",
                                "values": [{"of": "load", "metric": "output_throughput"}]}],
        "expect": list(expect) or [side("host", "device", 1.2)], "questions": ["Why?"], "next": ["More."]}, 1, FOLDER)


def side(left: str, right: str, at_least: float, **more: Any) -> dict[str, Any]:
    def value(arm: str) -> dict[str, Any]:
        return {"of": "load", "metric": "output_throughput", "arm": arm, "workload": "chats"}

    return {"says": f"{left} beats {right}", "left": value(left), "right": value(right), "at-least": at_least, **more}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make `host` 1.6 times as fast as `device`, `slow` 0.7 times; `warm` fails a gate, `vllm` was skipped."""
    folder = tmp_path_factory.mktemp("course")
    write_results(folder / "week01-cpu" / "load", rates=(), blocks=6)
    (folder / "week01-cpu" / "latency.json").write_text(json.dumps({"results": [
        {"batch_size": 1, "token_times": [0.010, 0.011, 0.012], "decode_step": {"limit_seconds": 0.008}},
        {"batch_size": 8, "token_times": [0.030, 0.020, 0.025], "decode_step": {"limit_seconds": 0.009},
         "rate": {"low": 300.0, "median": 320.0, "high": 400.0}}]}))
    CourseRun.of(folder, week_of(), "cpu", "spillover").note()
    return folder


def outcome(results: Path, expectation: dict[str, Any]) -> Outcome:
    (found,) = check(CourseRun.of(results, week_of(expectation), "cpu", "spillover"))
    return found


@pytest.mark.parametrize(("left", "right", "at_least", "expected"), [
    ("host", "device", 1.2, HOLDS), ("device", "host", 1.2, FAILS), ("host", "device", 3, FAILS),
    ("device", "slow", 1.1, HOLDS), ("slow", "device", 1, FAILS),
])
def test_an_expectation_holds_or_does_not_as_the_numbers_say(results: Path, left: str, right: str, at_least: float,
                                                             expected: str) -> None:
    found = outcome(results, side(left, right, at_least))
    assert found.outcome == expected
    assert "95% interval over 6 runs" in found.text
    assert f"at least {at_least:.3g} expected" in found.text


@pytest.mark.parametrize(("left", "told"), [("warm", "were hits, but the workload shares only"),
                                            ("vllm", "vllm is not installed")])
def test_what_does_not_count_or_is_not_there_decides_nothing(results: Path, left: str, told: str) -> None:
    found = outcome(results, side(left, "device", 1))
    assert found.outcome == UNDECIDED
    assert told in found.text
    assert ("which does not count" in found.text) == (left == "warm")  # its numbers are printed nevertheless


def test_arms_of_two_engines_decide_nothing(results: Path) -> None:
    """Results of `host` from another engine decide nothing, because no week compares engines."""
    (results / "week01-cpu-vllm").mkdir(exist_ok=True)
    if not (results / "week01-cpu-vllm" / "load").exists():
        (results / "week01-cpu-vllm" / "load").symlink_to(results / "week01-cpu" / "load")
    week = week_of(side("host", "device", 1.2), vllm={"host": {}})
    (found,) = check(CourseRun.of(results, week, "cpu", "vllm"))
    assert (found.outcome, found.open) == (UNDECIDED, False)
    assert found.text == "two engines are compared: device by spillover; host by vllm"
    both = week_of(side("host", "device", 1.2), vllm={"host": {}, "device": {}})
    assert [each.outcome for each in check(CourseRun.of(results, both, "cpu", "vllm"))] == [HOLDS]
    assert [each.outcome for each in check(CourseRun.of(results, week, "cpu", "spillover"))] == [HOLDS]


def test_an_experiment_that_has_only_begun_is_undecided(tmp_path: Path) -> None:
    write_results(tmp_path / "week01-cpu" / "load", ("device", "host"), rates=(), blocks=3, passes=0)
    found = outcome(tmp_path, side("host", "device", 1))
    assert (found.outcome, found.text) == (UNDECIDED, "host has not been run on chats yet")


def test_an_experiment_goes_on_while_more_runs_may_decide_an_expectation(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "week01-cpu" / "load", ("device", "host", "warm"), rates=(), blocks=6, passes=2)
    for expect, least, decided in ((side("host", "device", 1.2), 4, True), (side("host", "device", 1.6), 4, False),
                                   (side("warm", "device", 1), 2, True), (side("vllm", "device", 1), 2, True)):
        run = CourseRun.of(tmp_path, week_of(expect), "cpu", "spillover")
        write_results(folder, ("device", "host", "warm"), rates=(), blocks=6, passes=2)
        assert decision_rule(run, "load")(Results.open(folder)) == (least == 2)
        write_results(folder, ("device", "host", "warm"), rates=(), blocks=6, passes=least)
        assert decision_rule(run, "load")(Results.open(folder)) == decided, expect
        assert decision_rule(run, "other")(Results.open(folder))


def test_runs_that_a_busy_moment_disturbed_are_left_out_until_they_are_most(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "week01-cpu" / "load", ("device", "host"), rates=(), blocks=8)
    keys = [visit["key"] for visit in Results.open(folder).visits if visit["arm"] == "host"]
    for count, expected in ((3, HOLDS), (5, UNDECIDED)):
        for key in keys[:count]:
            path = folder / "visits" / f"{key}.json"
            fault = Fault("client-saturated", "the client did not keep up", transient=True).to_json()
            visit = json.loads(path.read_text())
            visit["metrics"]["output_throughput"] /= 1000
            path.write_text(json.dumps({**visit, "faults": [fault]}))
        (folder / "analysis.json").unlink(missing_ok=True)
        found = outcome(tmp_path, side("host", "device", 1.2))
        assert found.outcome == expected, found
        assert ("did not keep up" in found.text, found.open) == (expected == UNDECIDED, expected == UNDECIDED)


@pytest.mark.parametrize(("left", "right", "expected"), [
    ([0.4] * 5, [0.0] * 5, HOLDS), ([0.0] * 5, [0.3] * 5, FAILS), ([0.0] * 5, [0.0] * 5, FAILS),
    ([0.4] * 4, [0.0] * 4, UNDECIDED), ([0.4, 0.4, 0.1, 0.4, 0.4], [0.0, 0.0, 0.3, 0.0, 0.0], UNDECIDED),
])
def test_where_a_value_is_0_all_runs_must_say_the_same(left: list[float], right: list[float], expected: str) -> None:
    value = Value("load", "metric", ("hit_rate",))
    sides = [Series("a", "w", tuple(values), tuple(range(len(values)))) for values in (left, right)]
    found = _with_zeros(Expectation("x", value, value, at_least=1.1), *sides)
    assert found.outcome == expected
    assert found.open == (len(left) < 5)


def test_same_is_an_expectation_too(results: Path) -> None:
    for within, expected in ((0.9, HOLDS), (0.1, FAILS)):
        expectation = side("host", "device", 1)
        del expectation["at-least"]
        assert outcome(results, {**expectation, "within": within}).outcome == expected


def test_commands_decide_only_where_all_their_values_agree(results: Path) -> None:
    def times(batch: int) -> dict[str, Any]:
        return {"of": "latency", "key": "token_times", "where": {"batch_size": batch}}

    for at_least, expected in ((1.6, HOLDS), (2, UNDECIDED), (4, FAILS)):
        found = outcome(results, {"says": "x", "left": times(8), "right": times(1), "at-least": at_least})
        assert found.outcome == expected, found
    limit = {"of": "latency", "key": "decode_step.limit_seconds", "where": {"batch_size": 1}}
    assert outcome(results, {"says": "x", "left": limit, "at-least": 0.008}).outcome == HOLDS
    assert outcome(results, {"says": "x", "left": {**limit, "key": "nothing"}, "at-least": 1}).outcome == UNDECIDED


def test_an_expectation_of_another_size_is_left_out(results: Path) -> None:
    week = week_of(side("host", "device", 1, scales=["gpu"]), side("device", "host", 1))
    assert [each.outcome for each in check(CourseRun.of(results, week, "cpu", "spillover"))] == [FAILS]


def test_a_week_that_was_not_run_is_undecided_and_is_no_run(tmp_path: Path) -> None:
    run = CourseRun.of(tmp_path, week_of(), "cpu", "spillover")
    assert [each.text for each in check(run)] == ["load was not run"]
    assert runs_of(tmp_path, run.week) == []
    run.note("load", reason="baseline 'device' cannot be measured", done=False)
    again = CourseRun.of(tmp_path, week_of(), "cpu", "spillover")
    assert check(again)[0].text == "baseline 'device' cannot be measured"


def test_the_last_run_comes_first(tmp_path: Path) -> None:
    week = week_of()
    for scale in ("gpu", "cpu", "gpu"):
        CourseRun.of(tmp_path, week, scale, "spillover").note()
    assert [run.scale for run in runs_of(tmp_path, week)] == ["gpu", "cpu"]


def test_a_table_has_a_line_per_arm_and_says_what_is_missing(results: Path) -> None:
    values: dict[str, list[dict[str, Any]]] = {
        "Busy": [{"of": "load", "monitor": "GPU busy"}, {"of": "load", "monitor": "CPU busy", "factor": 100}],
        "Blocks": [{"of": "load", "fact": "pool_blocks"}],
        "Rate": [{"of": "latency", "key": "rate", "each": "batch_size"}],
        "Ratio": [{"of": "load", "metric": "p99_itl_ms", "over": "median_itl_ms", "workload": "chats"}]}
    rows: list[dict[str, Any]] = [{"name": name, "about": "a", "unit": "u", "values": found}
                                  for name, found in values.items()]
    rows.append({"name": "None", "about": "a", "unit": "%", "absent": {"cpu": "not here", "gpu": "nor there"}})
    busy, blocks, rate, ratio, none = filled_rows(CourseRun.of(results, week_of(metrics=rows), "cpu", "spillover"))

    def cell(filled: Filled, name: str) -> Series:
        found = dict(filled.rows)[name][0]
        assert found is not None
        return found

    assert cell(busy, "host").median == pytest.approx(83, abs=3)
    assert "GPU" not in " ".join(busy.notes)  # another value replaces it
    assert [name for name, _ in blocks.rows] == ["device", "host", "warm", "slow"]
    assert cell(blocks, "host").values == (96.0,)
    assert "vllm is not installed" in " ".join(blocks.notes)
    assert rate.columns == ("batch size 8",)
    assert cell(rate, "latency").values == (300.0, 320.0, 400.0)
    assert all((cell(ratio, name).median or 0) > 1 for name, _ in ratio.rows)
    assert none.notes == ("not here",)


EXPECTATION = Expectation("x", Value("load", "metric", ("m",)), at_least=1.5)
numbers = st.floats(0.1, 1e4)


@given(st.lists(numbers, min_size=1, max_size=9), st.floats(0.2, 5), st.floats(0.2, 5))
def test_where_every_run_has_the_same_ratio_that_ratio_decides(base: list[float], ratio: float, asked: float) -> None:
    expectation = Expectation("x", EXPECTATION.left, at_least=asked)
    passes = tuple(range(len(base)))
    left = Series("a", "w", tuple(ratio * each for each in base), passes)
    found = _paired(expectation, left, Series("b", "w", tuple(base), passes))
    if len(base) < 3:
        assert found.outcome == UNDECIDED
    elif abs(ratio / asked - 1) > 1e-6:
        assert found.outcome == (HOLDS if ratio > asked else FAILS)


@given(st.lists(numbers, min_size=1, max_size=5), st.lists(numbers, min_size=1, max_size=5), st.floats(0.01, 100))
def test_values_measured_apart_decide_as_every_pair_does(left: list[float], right: list[float], asked: float) -> None:
    found = _by_ranges(Expectation("x", EXPECTATION.left, at_least=asked), left, right)
    pairs = {HOLDS if high / low >= asked else FAILS for high in left for low in right}
    assert found.outcome == (pairs.pop() if len(pairs) == 1 else UNDECIDED)
