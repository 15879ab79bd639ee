"""Two results of one measurement are compared: slowdowns are reported, also by the exit code."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cli.lab.lab import lab
from spillover.errors import SpilloverError
from spillover.lab.compare import Result, Sample, as_file, compare, read_result
from spillover.lab.run import run_experiment
from spillover.lab.store import Results, write_json
from spillover.lab.verdict import FASTER, NO_DIFFERENCE, NO_VERDICT, SAME, SLOWER, Rule
from support.lab.fake_lab import FakeLoad, experiment

RULE = Rule(0.99, 2, 0.02)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def result(values: Sequence[float], lower: bool = False, names: Sequence[str] = ("it",)) -> Result:
    return Result(Path("here"), dict.fromkeys(names, Sample(tuple(values), lower)))


def verdict(before: Sequence[float], after: Sequence[float], lower: bool = False, rule: Rule = RULE) -> str:
    (change,) = compare(result(before, lower), result(after, lower), rule)
    return change.verdict


@pytest.mark.parametrize(("before", "after", "word"), [
    ([100, 101, 99, 100], [80, 81, 79, 80], SLOWER), ([100, 101, 99, 100], [130, 131, 129, 130], FASTER),
    ([100, 100.1, 99.9] * 3, [100, 100.2, 99.9] * 3, SAME), ([100, 140, 60], [90, 130, 70], NO_DIFFERENCE),
    ([100], [50, 50], NO_VERDICT), ([100, 0], [50, 50], NO_VERDICT), ([100, 100], [100, 100], SAME),
])
def test_the_verdict_says_what_the_repeats_say(before: list[float], after: list[float], word: str) -> None:
    assert verdict(before, after) == word
    turned = {SLOWER: FASTER, FASTER: SLOWER}.get(word, word)
    assert verdict(before, after, lower=True) == turned  # of times, less is better
    assert verdict(after, before) == turned


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.2, 5), st.floats(0.001, 0.2), st.integers(2, 9))
def test_a_scale_of_all_values_changes_nothing(seed: int, ratio: float, spread: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    before, after = (np.exp(rng.normal(math.log(each), spread, count)).tolist() for each in (1.0, ratio))
    assert verdict(before, after) == verdict([1000 * each for each in before], [1000 * each for each in after])


def test_equal_commits_are_seldom_called_slower() -> None:
    rng = np.random.default_rng(0)
    found = [verdict(np.exp(rng.normal(0, 0.05, 5)).tolist(), np.exp(rng.normal(0, 0.05, 5)).tolist(),
                     rule=Rule(0.95, 2, 0.0)) for _ in range(400)]
    assert found.count(SLOWER) + found.count(FASTER) <= 400 * 0.08  # 5% is promised


def test_more_comparisons_ask_for_more() -> None:
    def verdicts(count: int) -> set[str]:
        names = [str(index) for index in range(count)]
        sides = result([100, 101, 99], names=names), result([95, 96, 94], names=names)
        return {change.verdict for change in compare(*sides, RULE)}

    assert verdicts(1) == {SLOWER}
    assert verdicts(200) == {NO_DIFFERENCE}


@pytest.mark.parametrize("name", ["latency.json", "transformers.json", "seed-000.json", "lab-engines.json",
                                  "cost-of-same-bits.json", "kv-tiers-cpu.json", "host-pool.json", "w2-qwen3-8b.json"])
def test_a_result_of_this_project_against_itself_is_never_slower(name: str) -> None:
    found = read_result(RESULTS / name)
    changes = compare(found, found, RULE)
    assert {change.verdict for change in changes} <= {SAME, NO_DIFFERENCE, NO_VERDICT}
    assert all(change.speed == pytest.approx(1) for change in changes if change.speed is not None)


@pytest.mark.parametrize(("name", "what", "lower"), [
    ("seed-000.json", "seed-000, mean TTFT, experts", True),
    ("w1-qwen3-0.6b.json", "w1-qwen3-0.6b, output throughput", False),
    ("latency.json", "batch_size 16, token_times", True), ("lab-engines.json", "four, vllm: output_throughput", False),
    ("cost-of-same-bits.json", "w3, token, default_seconds", True), ("kv-tiers-cpu.json", "no-reuse, host+disk", True),
])
def test_repeats_are_found_with_the_way_they_count(name: str, what: str, lower: bool) -> None:
    assert read_result(RESULTS / name).samples[what].lower is lower


def figures(value: float, **more: Any) -> list[dict[str, Any]]:
    return [{"workload": "w", "metric": "rate", "unit": "tok/s", "repeats": [value, value * 1.01, value * 0.99],
             "commit": "c" * 40, "gpu": "card", **more}]


def test_the_command_fails_where_something_is_slower(tmp_path: Path) -> None:
    for name, value in (("a", 100.0), ("b", 70.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(figures(value)))
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    slower, faster = (CliRunner().invoke(lab, ["compare", *each]) for each in (paths, paths[::-1]))
    assert (slower.exit_code, faster.exit_code) == (1, 0)
    assert "slower" in slower.output
    assert "0.700x" in slower.output
    told = json.loads(CliRunner().invoke(lab, ["compare", *paths, "--json"]).output)
    assert [(each["name"], each["verdict"]) for each in told] == [("w, rate", SLOWER)]


@pytest.mark.parametrize(("other", "words"), [
    (figures(70.0, gpu="another"), "they differ in more than the commit"),
    (figures(70.0, metric="another"), "no repeats of the same measurement"),
])
def test_what_is_not_the_same_measurement_is_refused(other: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(figures(100.0)))
    (tmp_path / "b.json").write_text(json.dumps(other))
    with pytest.raises(SpilloverError, match=words):
        compare(read_result(tmp_path / "a.json"), read_result(tmp_path / "b.json"), RULE)


def ran(folder: Path, slowdown: float, **changes: Any) -> Path:
    load = FakeLoad(seed=3, walk=0.0)
    load._machine = math.log(slowdown)
    run_experiment(experiment(max_blocks=4, **changes), folder, load.bench())
    return folder


def test_folders_of_one_experiment_at_two_commits_are_compared(tmp_path: Path) -> None:
    before, after = ran(tmp_path / "before", 1.0), ran(tmp_path / "after", 1.3)
    changes = compare(read_result(before), read_result(after), RULE)
    assert {change.name for change in changes if change.before.primary} == {"load, a: output_throughput",
                                                                          "load, b: output_throughput"}
    assert {change.verdict for change in changes if change.before.primary} == {SLOWER}
    file = tmp_path / "after.json"
    write_json(file, as_file(Results.open(after)))  # --output-json
    assert compare(read_result(before), read_result(file), RULE) == changes
    other = ran(tmp_path / "other", 1.0, equivalence="5%")
    with pytest.raises(SpilloverError, match="not of the same experiment: its 'equivalence'"):
        compare(read_result(before), read_result(other), RULE)
