"""Latency separates prefill from decode and never sends a prompt twice."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from spillover.bench.latency import LatencyResult, measure
from spillover.bench.report import latency_table
from spillover.bench.workloads.workloads import Vocabulary
from support.lab.fake_target import FakeLimits, FakeTarget


def test_iterations_run_on_fresh_prompts() -> None:
    target = FakeTarget(limits=FakeLimits())
    result = measure(target, Vocabulary(1000), 3, 40, 6, num_iters=4, num_iters_warmup=2)
    assert [call[0].output_len for call in target.calls] == [6] * 6
    prompts = [request.prompt_token_ids for call in target.calls for request in call]
    assert len(prompts) == len(set(prompts)) == 3 * 6
    assert {len(prompt) for prompt in prompts} == {40}
    assert len(result.latencies) == len(result.first_tokens) == len(result.token_times) == 4


def test_the_json_has_vllms_keys() -> None:
    result = measure(FakeTarget(limits=FakeLimits()), Vocabulary(1000), 2, 8, 4, 5, 1).as_dict()
    assert {"avg_latency", "latencies", "percentiles"} <= set(result)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert len(result["latencies"]) == 5


def test_phases_are_told_apart_and_held_to_their_limits() -> None:
    measured = measure(FakeTarget(limits=FakeLimits()), Vocabulary(1000), 2, 100, 11, 3, 0)
    assert measured.token_time is not None
    assert measured.token_time.median == pytest.approx(0.5)
    assert measured.prefill is not None
    assert measured.prefill.bound.flops == 200
    assert measured.prefill.bound.name == "compute"
    assert measured.prefill.of_limit == pytest.approx(measured.prefill.bound.seconds / 2.0)
    assert measured.decode is not None
    assert measured.decode.bound.bytes == 50 + 2 * 105
    assert measured.decode.seconds == pytest.approx(0.5)


def test_the_table_has_a_row_a_phase_and_no_decode_for_one_token() -> None:
    out = io.StringIO()
    results = [LatencyResult(1, 8, 5, (1.0,), (0.2,), (0.2,)), LatencyResult(4, 8, 1, (1.0,), (1.0,))]
    Console(file=out, width=160).print(latency_table(results))
    text = out.getvalue()
    assert "prefill, batch 1" in text
    assert "decode step, batch 1" in text
    assert "decode step, batch 4" not in text
    assert "200.0 ms" in text
