"""Each gate finds the fault that it is for, and nothing in a sound run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.errors import SpilloverError
from spillover.lab.analysis import analysis_of
from spillover.lab.run import run_experiment
from spillover.lab.validity import ArmSample, Fault, Gates, across, judge
from support.lab.fake_lab import FakeEngine, FakeLoad, experiment, make_run
from support.lab.run_samples import sample


def edited(run: Run, index: int, **changes: Any) -> Run:
    records = list(run.records)
    records[index] = replace(records[index], **changes)
    return replace(run, records=tuple(records))


def later(record: RequestRecord, seconds: float) -> dict[str, Any]:
    return {"chunks": tuple((at + seconds, count) for at, count in record.chunks), "done": record.done + seconds}


def gates(faults: list[Fault]) -> list[str]:
    return [fault.gate for fault in faults]


def only(faults: list[Fault]) -> Fault:
    assert len(faults) == 1, faults
    return faults[0]


def test_a_sound_run_passes_every_gate() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert judge(sample(make_run(rng=rng)), Gates()) == []


def test_errors() -> None:
    fault = only(judge(sample(edited(make_run(), 3, error="HTTP 500: boom")), Gates()))
    assert fault.gate == "errors"
    assert "1 of 20 requests failed: HTTP 500: boom" in fault.reason
    assert judge(sample(edited(make_run(), 3, error="x")), Gates.parse({"errors": 1})) == []
    nothing = replace(make_run(), records=())
    assert "errors" in gates(judge(sample(nothing), Gates()))


def test_a_cold_start_inside_the_run() -> None:
    run = make_run()
    cold = edited(run, 0, **later(run.records[0], 4.9))
    fault = only(judge(sample(cold), Gates()))
    assert fault.gate == "cold-start"
    assert "waited 5000 ms for its first token, others like it 100 ms" in fault.reason
    assert only(judge(sample(warmups=0), Gates())).gate == "cold-start"


def test_a_longer_prompt_or_a_prefix_that_others_reuse_is_no_cold_start() -> None:
    run = make_run()
    long = edited(run, 0, **later(run.records[0], 0.9), prompt_tokens=1000)
    assert judge(sample(long), Gates()) == []
    # The first request with a shared prefix computes it, as shown by the server's or the workload's numbers.
    slow = edited(run, 0, **later(run.records[0], 0.9))
    told = replace(slow, records=tuple(
        replace(record, sources={"computed": 100 if record.index == 0 else 4, "device": 0 if record.index == 0 else 96})
        for record in slow.records))
    assert judge(sample(told, sharing=0.95), Gates()) == []
    assert judge(sample(slow, sharing=0.95), Gates()) == []
    assert gates(judge(sample(slow), Gates())) == ["cold-start"]


def test_a_client_that_is_the_bottleneck() -> None:
    for client in (ClientHealth(saturated="sent 80 ms late"), ClientHealth(busy=0.97)):
        assert only(judge(sample(make_run(client=client)), Gates())).gate == "client-saturated"


def test_requests_sent_slower_than_asked() -> None:
    run = make_run()
    late = replace(run, records=tuple(replace(record, sent=1.03 * record.sent) for record in run.records))
    fault = only(judge(sample(late), Gates()))
    assert fault.gate == "rate"
    assert fault.value == pytest.approx(0.03, abs=0.002)
    assert gates(judge(sample(make_run(details={"request_rate": 25.0})), Gates())) == ["rate"]  # a wrong schedule
    assert judge(sample(replace(late, details={**late.details, "arrival": "closed"})), Gates()) == []
    by_chance = make_run(details={"request_rate": 21.0, "arrival": "poisson", "burstiness": 1.0})
    assert judge(sample(by_chance), Gates()) == []


def test_hits_that_the_workload_cannot_explain() -> None:
    warm = make_run(counters={"prefix_queries": 2000.0, "prefix_hits": 1900.0})
    fault = only(judge(sample(warm), Gates()))
    assert fault.gate == "contamination"
    assert "95% of prompt tokens were prefix hits, but the workload shares 0%" in fault.reason
    assert judge(sample(warm, sharing=0.95), Gates()) == []
    by_request = replace(make_run(), records=tuple(replace(record, sources={"computed": 20, "host": 80})
                                                   for record in make_run().records))
    assert gates(judge(sample(by_request), Gates())) == ["contamination"]
    # A cache that matches single tokens finds the start of a template in every prompt.
    assert judge(sample(make_run(counters={"prefix_cache_queries": 2000.0, "prefix_cache_hits": 40.0})), Gates()) == []


def test_a_server_that_does_not_tell_its_hits_is_noted_and_judged_all_the_same() -> None:
    fault = only(judge(sample(make_run(counters={})), Gates()))
    assert (fault.gate, fault.fatal) == ("contamination", False)


def test_answers_of_another_length() -> None:
    fault = only(judge(sample(edited(make_run(), 5, output_tokens=3)), Gates()))
    assert fault.gate == "lengths"
    assert "155 tokens instead of 160" in fault.reason
    free = make_run(details={"ignore_eos": False})
    assert judge(sample(edited(free, 5, output_tokens=3)), Gates()) == []
    assert gates(judge(sample(edited(free, 5, output_tokens=12)), Gates())) == ["lengths"]


def test_too_few_samples_take_the_verdict_of_their_metric_alone() -> None:
    wanted = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "p90_itl_ms", "median_tpot_ms")
    fault = only(judge(sample(metrics=wanted), Gates()))
    assert (fault.gate, fault.metric) == ("samples", "p99_ttft_ms")
    assert "20 requests per run, and at least 500 are needed" in fault.reason
    few = judge(sample(make_run(count=8), metrics=wanted), Gates())
    assert {found.metric for found in few} == {"p99_ttft_ms", "median_tpot_ms"}  # 56 gaps are enough for a p90


def test_a_working_set_that_fits_the_device() -> None:
    fault = only(judge(sample(pool=5000), Gates()))
    assert fault.gate == "offload"
    assert "the working set is 4,000 tokens and the device holds 5,000" in fault.reason
    assert judge(sample(pool=5000, offload=False), Gates()) == []
    assert only(judge(sample(pool=None), Gates())).fatal is False


def test_arms_that_drift_apart() -> None:
    def arm(ratios: list[float]) -> ArmSample:
        return ArmSample(ratios, {}, ())

    assert gates(across(arm([1.0, 0.96, 0.93, 0.89, 0.86, 0.82]), Gates())) == ["drift"]
    assert across(arm([1.0, 1.02, 0.99, 1.01, 0.98, 1.0]), Gates()) == []
    rng = np.random.default_rng(0)
    steady = [across(arm(rng.lognormal(0, 0.03, size=8).tolist()), Gates()) for _ in range(200)]
    assert sum(map(len, steady)) <= 2


def test_arms_that_did_not_do_the_same_work() -> None:
    assert gates(across(ArmSample((), {"input": (1000, 1000), "output": (900, 1000)}, ()), Gates())) == ["unequal"]
    assert across(ArmSample((), {"input": (1000, 1000), "output": (995, 1000)}, ()), Gates()) == []


def test_an_engine_that_was_updated_meanwhile() -> None:
    assert gates(across(ArmSample((), {}, ("1.0", "1.0", "1.1")), Gates())) == ["version"]


def test_gates_are_set_by_name() -> None:
    assert judge(sample(pool=5000), Gates.parse({"offload": False})) == []
    assert Gates.parse({"cold-start": 5, "rate": True}) == replace(Gates(), cold_start=5)
    assert Gates.parse(Gates.parse({"drift": False}).to_json()) == Gates.parse({"drift": False})
    with pytest.raises(SpilloverError, match=r"no gate 'ofload'; did you mean 'offload'\?"):
        Gates.parse({"ofload": False})
    with pytest.raises(SpilloverError, match="takes a limit or false"):
        Gates.parse({"rate": "much"})


FAULTS: dict[str, dict[str, Any]] = {
    "drift": {"on_measure": lambda engine, repeat: _slow_down(engine, repeat)},
    "offload": {"working_set_tokens": 400},
}


def _slow_down(engine: FakeEngine, repeat: int) -> None:
    if engine.spec.args.get("tires"):
        engine.spec = replace(engine.spec, args={**engine.spec.args, "slowdown": 1.04 ** repeat})


@pytest.mark.parametrize("gate", FAULTS)
def test_an_arm_that_is_not_valid_gets_no_verdict(tmp_path: Path, gate: str) -> None:
    """In a whole experiment, an invalid arm b is far slower, which appears as a number and not as a verdict."""
    made = experiment(arms={"a": {"engine": "spillover", "args": {"pool": 1000}},
                            "b": {"engine": "spillover", "args": {"pool": 1000, "slowdown": 2, "tires": True,
                                                                  "host-memory": "1GB"}}})
    load = FakeLoad(**{"unrest": 0.002, **FAULTS[gate]})
    analysis = analysis_of(run_experiment(made, tmp_path / "results", load.bench()))
    cells = {cell["arm"]: cell for cell in analysis["cells"]}
    assert not cells["b"]["valid"]
    assert [fault["gate"] for fault in cells["b"]["faults"]] == [gate]
    for verdict in analysis["verdicts"]:
        assert verdict["verdict"] == "no verdict"
        assert "is not valid" in verdict["why"]
        assert verdict["ratio"] is not None
