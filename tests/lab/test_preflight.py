"""Foreseeable problems are reported before the first run: gates that will reject it, and engines that cannot start."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cli.lab.lab_run import duration
from spillover.cli.main import main
from spillover.errors import SpilloverError
from spillover.lab.experiment import Arm, Experiment, parse_experiment
from spillover.lab.preflight import foreseen, sending_seconds, workload_stats
from spillover.lab.run import Watcher, run_experiment
from spillover.lab.store import Results
from spillover.lab.validity import Gates, few_samples, judge
from support.lab.fake_lab import FakeLoad, experiment, make_run
from support.lab.run_samples import sample

LOAD = {"dataset-name": "random", "num-prompts": 12, "random-input-len": 32, "random-output-len": 6}


def told(**changes: Any) -> list[str]:
    made = experiment(**{"workloads": {"load": LOAD}, **changes})
    return foreseen(made, workload_stats(made))


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_six_requests_where_ten_are_needed_are_seen_beforehand() -> None:
    found = told(workloads={"load": {**LOAD, "num-prompts": 6}})
    assert len(found) == 2  # for two medians
    assert found[0].startswith("workload 'load', gate samples: median_ttft_ms rests on 6 requests per run, and at "
                               "least 10 are needed")
    assert told() == []
    assert told(workloads={"load": {**LOAD, "num-prompts": 6}}, gates={"samples": False}) == []


@settings(max_examples=60, deadline=None)
@given(requests=st.integers(1, 40), output=st.integers(1, 12),
       metric=st.sampled_from(["median_ttft_ms", "p90_tpot_ms", "p99_itl_ms", "mean_ttft_ms", "median_itl_ms"]))
def test_what_the_gate_finds_after_a_run_was_known_before_it(requests: int, output: int, metric: str) -> None:
    after = [fault for fault in judge(sample(make_run(count=requests, output=output), metrics=(metric,)), Gates())
             if fault.gate == "samples"]
    assert few_samples((metric,), requests, requests * (output - 1), 5) == after


def test_a_working_set_that_fits_no_warm_up_and_long_prompts_are_seen_beforehand() -> None:
    arms = {"a": {"engine": "spillover", "args": {"num-gpu-blocks-override": 1000}},
            "b": {"engine": "spillover", "args": {"num-gpu-blocks-override": 2, "max-model-len": 16}}}
    found = told(arms=arms, warmups=0, workloads={"load": {**LOAD, "offload": True}})
    assert len(found) == 3
    assert "warmups is 0, and the gate cold-start" in found[0]
    assert "arm 'a', gate offload: the working set is" in found[1]
    assert "the device holds 16,000" in found[1]
    assert "arm 'b': prompts have up to 32 tokens, and max-model-len is 16" in found[2]


def test_a_limit_below_which_nothing_can_be_decided_is_seen_beforehand() -> None:
    assert told(max_blocks=3) == ["max-blocks is 3, and 1 comparison at 0.99 confidence take at least 4 blocks"]
    assert told(max_blocks=4) == []


def test_the_time_of_sending_is_known_where_there_is_a_rate() -> None:
    made = experiment(workloads={"rated": {**LOAD, "request-rate": 3}, "free": LOAD,
                                 "cut": {**LOAD, "request-rate": 3, "max-seconds": 2}})
    stats = workload_stats(made)
    assert [sending_seconds(workload, stats[workload.name]) for workload in made.workloads] == [4.0, None, 2.0]


def spill(*words: str) -> Any:
    return CliRunner().invoke(main, list(words))


def urls(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "away.yaml"
    path.write_text(json.dumps({
        "name": "away", "restart": "never", "workloads": {"load": {**LOAD, "num-prompts": 6}},
        "arms": {name: {"engine": "url", "url": unused_url(), "ready-seconds": 1} for name in "ab"}, **changes}))
    return path


def test_a_dry_run_tells_what_will_be_refused_and_starts_nothing(tmp_path: Path) -> None:
    shown = spill("lab", "run", str(urls(tmp_path)), "--dry-run", "--time-limit", "45min")
    assert shown.exit_code == 0, shown.output
    output = " ".join(shown.output.split())
    assert output.count("There will be no verdict: workload 'load', gate samples") == 2
    assert output.count("(does not answer now)") == 2
    assert "start" not in output
    assert "at least 4 blocks, at most 80 blocks or 45 min" in output


def test_a_url_that_does_not_answer_ends_the_experiment_soon_and_says_what_was_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    refused = spill("lab", "run", str(urls(tmp_path)), "--out", str(tmp_path / "r"), "--no-report")
    assert refused.exit_code == 2
    output = " ".join(refused.output.split())
    assert "waiting for http://127.0.0.1:" in output
    assert "to answer, at most 1 s" in output
    assert "cannot be measured: no start: no server answers at http://127.0.0.1:" in output
    assert time.monotonic() - begun < 60
    assert not list((tmp_path / "r" / "visits").glob("*"))


def test_a_server_that_should_be_running_is_waited_for_half_a_minute() -> None:
    made = parse_experiment({"name": "n", "workloads": {"load": LOAD}, "arms": {
        "a": {"engine": "url", "url": "http://127.0.0.1:1"}, "b": {"engine": "spillover"}}})
    assert [arm.spec.ready_seconds for arm in made.arms] == [30, 600]


class Told(Watcher):
    def __init__(self) -> None:
        self.events: list[str] = []

    def starting(self, arm: Arm) -> None:
        self.events.append(f"start {arm.name}")

    def arm_failed(self, arm: Arm, why: str) -> None:
        self.events.append(f"failed {arm.name}: {why}")

    def block_begins(self, block: int, runs: int) -> None:
        self.events.append(f"block {block}")


def three(**changes: Any) -> Experiment:
    return experiment(max_blocks=2, arms={
        "a": {"engine": "spillover"}, "big": {"engine": "spillover", "args": {"fails": "start"}},
        "c": {"engine": "spillover"}}, **changes)


@pytest.mark.parametrize("restart", ["per-visit", "never"])
def test_an_arm_that_cannot_start_is_found_before_the_first_run(tmp_path: Path, restart: str) -> None:
    watcher, load = Told(), FakeLoad()
    run_experiment(three(restart=restart), tmp_path / "r", load.bench(), watcher)
    first = watcher.events.index("block 0")
    assert watcher.events[:first] == ["start big", "failed big: out of memory: asked for 90 GB of 80", "start c",
                                      "start a"]
    assert "start big" not in watcher.events[first:]
    assert all(engine._running is None for engine in load.engines.values())


def test_a_baseline_that_cannot_start_ends_it_before_the_first_run(tmp_path: Path) -> None:
    load = FakeLoad()
    with pytest.raises(SpilloverError, match="baseline 'big' cannot be measured: out of memory"):
        run_experiment(three(baseline="big"), tmp_path / "r", load.bench())
    assert load.measured == []
    assert Results.open(tmp_path / "r").visits == ()
    assert all(engine._running is None for engine in load.engines.values())


def test_durations_are_read_at_a_glance() -> None:
    assert [duration(seconds) for seconds in (0.2, 45, 150, 3600, 7500)] == ["1 s", "45 s", "2 min", "1 h", "2 h 5 min"]
