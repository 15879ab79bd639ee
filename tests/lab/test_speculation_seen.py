"""Draft counts of arms are read from their servers' counters, under the names of each engine, and reported."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spillover.bench.serving.server_facts import difference, parse_counters
from spillover.bench.serving.speculation_counters import acceptance_by_position, speculation_metrics
from spillover.engine.config import EngineConfig
from spillover.engine.output.outputs import DraftCounts
from spillover.lab.engines.metrics_text import parse_metrics
from spillover.lab.engines.sglang import SglangEngine
from spillover.lab.experiment import WorkloadSpec, load_experiment
from spillover.lab.report.data import read_report
from spillover.lab.report.markdown import markdown
from spillover.lab.report.speculation_table import speculation
from spillover.lab.run import run_experiment
from spillover.lab.traffic import Measured, Progress
from spillover.server.engine.protocol import LiveStats
from spillover.server.telemetry.metrics import Metrics, TokenCounts
from support.lab.fake_lab import FakeEngine, FakeLoad

VLLM = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} %d
"""


def ours(counts: DraftCounts, simulated: bool) -> str:
    """Return the metrics page of our own server."""
    plan = SimpleNamespace(placement=None, slot_bytes=0, dtype="float32", kv_cache_dtype="auto", block_size=8,
                           num_blocks=1)
    flags: dict[str, Any] = ({"load_format": "dummy", "speculative_simulate": "0.8,0.5"} if simulated
                             else {"speculative_method": "ngram", "num_speculative_tokens": 2})
    info: Any = SimpleNamespace(plan=plan, config=EngineConfig(**flags), restarts=0, started=1.0)
    stats = LiveStats(time=2.0, drafts=counts, draft_proposed=counts.tokens + 4, draft_seconds=0.25, verify_seconds=2.5)
    return Metrics("m").render(stats, info, TokenCounts()).decode()


@pytest.mark.parametrize("seed", range(20))
def test_counters_of_any_server_become_the_same_metrics(seed: int) -> None:
    rng = random.Random(seed)
    before, after = DraftCounts(by_position=(0, 0)), DraftCounts(by_position=(0, 0))
    for _ in range(rng.randint(0, 20)):
        before = before.plus(2, rng.randint(0, 2))
    after = before
    for _ in range(rng.randint(1, 20)):
        after = after.plus(2, rng.randint(0, 2))
    made = [after.drafts - before.drafts, after.tokens - before.tokens, after.accepted - before.accepted]
    positions = [count - earlier for count, earlier in zip(after.by_position, before.by_position, strict=True)]

    def metrics(texts: list[str]) -> dict[str, float]:
        return speculation_metrics(difference(parse_counters(texts[1]), parse_counters(texts[0])))

    found = {
        "vllm": metrics([VLLM % (one.drafts, one.tokens, one.accepted, *one.by_position) for one in (before, after)]),
        "ours": metrics([ours(one, simulated=False) for one in (before, after)]),
        "simulated": metrics([ours(one, simulated=True) for one in (before, after)]),
    }
    for name, told in found.items():
        assert told["spec_acceptance_rate"] == pytest.approx(made[2] / made[1])
        assert told["spec_tokens_per_pass"] == pytest.approx(1 + made[2] / made[0])
        assert told["spec_wasted_tokens"] == made[1] - made[2]
        shares = [count / made[0] for count in positions if count]
        assert acceptance_by_position(told) == pytest.approx(shares)
        assert ("spec_simulated" in told) == (name == "simulated")
        assert ("spec_verify_ms" in told) == (name != "vllm")


def test_a_server_that_drafts_nothing_tells_nothing() -> None:
    assert speculation_metrics({}) == {}
    assert speculation_metrics(parse_counters(ours(DraftCounts(), simulated=False))) == {}


def test_sglang_tells_two_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'sglang:spec_accept_length{dp="0"} 3.0\nsglang:spec_accept_length{dp="1"} 2.0\nsglang:spec_accept_rate 0.5\n'
    engine = SglangEngine.__new__(SglangEngine)
    monkeypatch.setattr(SglangEngine, "metrics", lambda self: parse_metrics(text))
    assert speculation_metrics(engine.gauges()) == {"spec_acceptance_rate": 0.5, "spec_tokens_per_pass": 2.5}
    monkeypatch.setattr(SglangEngine, "metrics", lambda self: {})
    assert engine.gauges() == {}


class Drafting(FakeLoad):
    """Load on engines that report drafts: the configured number of tokens per pass, two thirds of them accepted."""

    def measure(self, workload: WorkloadSpec, running: Any, repeat: int, progress: Progress | None = None) -> Measured:
        measured = super().measure(workload, running, repeat, progress)
        counters = {**measured.run.counters, **_counters(self.engines[str(id(running))])}
        return replace(measured, run=replace(measured.run, counters=counters))


def _counters(engine: FakeEngine) -> Mapping[str, float]:
    config = engine.spec.args.get("speculative-config")
    if config is None:
        return {}
    tokens = config["num_speculative_tokens"]
    told = {"num_drafts": 30, "num_draft_tokens": 30 * tokens, "num_accepted_tokens": 20 * tokens,
            "verify_milliseconds": 400, "draft_milliseconds": 3}
    by_position = {f"spec_decode_num_accepted_tokens_per_pos/{place}/false": 20.0 for place in range(tokens)}
    return {**{f"spec_decode_{name}/false": float(value) for name, value in told.items()}, **by_position}


def test_week_11_has_the_metrics_of_its_document_in_the_report(tmp_path: Path) -> None:
    experiment = replace(load_experiment("seed-003-week11"), max_blocks=3, minimum_blocks=3)
    run_experiment(experiment, tmp_path, Drafting().bench())
    report = read_report(tmp_path)
    table = speculation(report)
    assert table is not None
    arms = [(row[0].text, row[1].text) for row in table.rows]
    assert arms == [(workload.name, f"ngram-{count}") for workload in experiment.workloads for count in (1, 3, 5, 7)]
    for row, count in zip(table.rows, (1, 3, 5, 7) * len(experiment.workloads), strict=True):
        cells = dict(zip(table.headings, (cell.text for cell in row), strict=True))
        assert cells["acceptance"] == "67%"
        assert cells["tokens per pass"] == {1: "1.67", 3: "3", 5: "4.33", 7: "5.67"}[count]
        assert cells["wasted"] == str(10 * count)
        assert cells["drafted"] == "-"  # not every server counts drafts that were cut
        assert cells["verifying, ms"] == "400"
        assert row[-1].text == " ".join(["67%"] * count)
    assert "### Speculation" in markdown(report, [])
