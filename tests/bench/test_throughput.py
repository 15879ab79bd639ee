"""What a throughput run sends, counts and writes, with a target that has no model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from spillover.bench.bounds import workload_bound
from spillover.bench.report import comparison, print_throughput, throughput_table, write_json
from spillover.bench.target import BenchRequest
from spillover.bench.throughput import Setting, measure, offline
from spillover.bench.workloads.workloads import Vocabulary
from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload, mixed_shapes, random_workload
from support.lab.fake_target import FakeLimits, FakeTarget

WORKLOAD = random_workload(Vocabulary(100), 8, input_len=12, output_len=5)


def into(made: list[FakeTarget], max_num_seqs: int = 4) -> Callable[[], FakeTarget]:
    def make() -> FakeTarget:
        made.append(FakeTarget(max_num_seqs, FakeLimits()))
        return made[-1]

    return make


def test_no_repeat_is_answered_from_the_cache_of_another() -> None:
    made: list[FakeTarget] = []
    result = measure(Setting({}, into(made)), WORKLOAD, num_iters=3)
    target = made[0]
    assert target.closed
    assert len(target.calls) == 4  # the warm-up and three repeats
    prompts = [{request.prompt_token_ids for request in call} for call in target.calls]
    for index, one in enumerate(prompts):
        for other in prompts[index + 1:]:
            assert not one & other
    assert target.resets == 3
    sources = {"computed": 96, "device": 0, "host": 0, "pool": 0, "disk": 0, "remote": 0}
    assert all(run.sources == sources for run in result.runs)


def test_a_target_that_compiles_for_shapes_meets_them_all_before_it_is_measured() -> None:
    made: list[FakeTarget] = []
    measure(Setting({}, into(made)), WORKLOAD, num_iters=2, compiles=True)
    warm, *measured = made[0].calls
    assert [(len(request.prompt_token_ids), request.output_len) for request in warm] == [
        (len(request.prompt_token_ids), request.output_len) for request in measured[0]]
    assert not {request.prompt_token_ids for request in warm} & {request.prompt_token_ids for request in measured[0]}


def test_the_json_has_vllms_keys_and_ours(tmp_path: Path) -> None:
    result = measure(Setting({"block-size": "16"}, into([])), WORKLOAD, num_iters=2)
    file = tmp_path / "result.json"
    write_json(str(file), {"command": "spill bench throughput"}, [result.as_dict()])
    written = json.loads(file.read_text())
    assert written["num_requests"] == 8
    assert written["total_num_tokens"] == 8 * 17
    assert written["requests_per_second"] == pytest.approx(8 / written["elapsed_time"])
    assert written["tokens_per_second"] == pytest.approx(8 * 17 / written["elapsed_time"])
    assert written["output_tokens_per_second"] == pytest.approx(8 * 5 / written["elapsed_time"])
    assert written["waste_percent"] == 25.0
    assert written["mean_slots_wasted"] == 8
    assert written["num_blocks"] == 100
    assert written["preemptions"] == 0  # a difference: preemptions before the run do not count
    assert len(written["repeats"]) == 2
    assert written["results"][0]["setting"] == {"block-size": "16"}
    assert written["roofline"]["bound"] in ("memory", "compute")


def test_a_sweep_gives_a_row_a_setting_relative_to_the_first() -> None:
    settings = [Setting({"max-num-seqs": str(size)}, into([], size)) for size in (1, 4, 16)]
    results = [measure(setting, WORKLOAD) for setting in settings]
    out = io.StringIO()
    console = Console(file=out, width=160)
    console.print(throughput_table(results))
    lines = out.getvalue().splitlines()
    assert "max-num-seqs" in lines[2]
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == ["1", "4", "16"]
    assert "1.00x" in lines[4]
    assert "8 (25.0%)" in lines[4]


def test_the_console_lines_are_those_that_parsers_of_vllm_read(capsys: pytest.CaptureFixture[str]) -> None:
    print_throughput(Console(), measure(Setting({}, into([])), WORKLOAD))
    out = capsys.readouterr().out
    assert "requests/s" in out.splitlines()[0]
    assert out.startswith("Throughput: ")
    assert "Total num prompt tokens:  96" in out
    assert "Total num output tokens:  40" in out


def test_both_backends_are_compared_at_their_best() -> None:
    results = [measure(Setting({"backend": name}, into([])), WORKLOAD) for name in ("hf", "spillover", "hf")]
    assert "x the output tokens" in comparison(results)[0]
    assert comparison(results[:1]) == []


def test_the_bound_counts_every_token_once_and_weights_once_a_step() -> None:
    requests = [BenchRequest(tuple(range(10)), 5)] * 4
    bound = workload_bound(FakeLimits(), requests, [0] * 4, max_num_seqs=2)
    # 40 prompt tokens, then 16 decoded in 8 steps of 2, at a context of 12 (10 and half of 5, rounded to even).
    assert bound.flops == 40 + 16
    assert bound.bytes == 50 + 8 * (50 + 2 * 12)
    assert bound.seconds == pytest.approx(max(bound.bytes / 1000, bound.flops / 100))
    cached = workload_bound(FakeLimits(), requests, [8] * 4, max_num_seqs=2)
    assert cached.flops == 4 * 2 + 16


def test_one_request_at_a_time_hides_nothing() -> None:
    requests = [BenchRequest(tuple(range(100)), 11)]
    alone = workload_bound(FakeLimits(), requests, [0], max_num_seqs=1)
    assert alone.seconds == pytest.approx(1.0 + 10 * (50 + 106) / 1000)
    assert workload_bound(FakeLimits(), requests, [0], max_num_seqs=2).seconds < alone.seconds


def test_the_bound_of_single_tokens_is_the_prefill() -> None:
    requests = offline(SyntheticWorkload("mixed", mixed_shapes(6, (3, 30), (1, 1)), Vocabulary(50)), 0)
    total = sum(len(request.prompt_token_ids) for request in requests)
    assert workload_bound(FakeLimits(), requests, [0] * 6, max_num_seqs=4).flops == total
