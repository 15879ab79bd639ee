"""The time that ranks of a sharded model waited for each other is read from the server's counters and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spillover.bench.serving.rank_counters import rank_metrics
from spillover.bench.serving.server_facts import difference, parse_counters
from spillover.engine.config import EngineConfig
from spillover.engine.parallel.report import RanksReport
from spillover.lab.experiment import WorkloadSpec, load_experiment
from spillover.lab.report.data import read_report
from spillover.lab.report.markdown import markdown
from spillover.lab.report.ranks_table import ranks
from spillover.lab.run import run_experiment
from spillover.lab.traffic import Measured, Progress
from spillover.server.engine.protocol import LiveStats
from spillover.server.telemetry.metrics import Metrics, TokenCounts
from support.lab.fake_lab import FakeLoad


def page(report: RanksReport, steps: int) -> str:
    """Return the metrics page of our own server."""
    plan = SimpleNamespace(placement=None, slot_bytes=0, dtype="float32", kv_cache_dtype="auto", block_size=8,
                           num_blocks=1)
    info: Any = SimpleNamespace(plan=plan, config=EngineConfig(), restarts=0, started=1.0)
    return Metrics("m").render(LiveStats(time=2.0, steps=steps, ranks=report), info, TokenCounts()).decode()


def test_counters_become_times_of_a_step_and_shares() -> None:
    before = page(RanksReport(2, 100, 5000, 1.0, (30, 10)), 10)
    after = page(RanksReport(2, 500, 9000, 1.5, (60, 50)), 30)
    found = rank_metrics(difference(parse_counters(after), parse_counters(before)), duration=2.0)
    assert found == pytest.approx({"ranks_calls_per_step": 20.0, "ranks_wait_us_per_step": 25_000.0,
                                   "ranks_wait_share": 0.25, "ranks_busiest_share": 40 / 70})


def test_one_rank_tells_nothing() -> None:
    assert rank_metrics(parse_counters(page(RanksReport(), 30)), 2.0) == {}
    assert rank_metrics({}, 2.0) == {}


class Ranked(FakeLoad):
    """Load on engines that report how long their ranks waited: 1 ms per step and rank."""

    def measure(self, workload: WorkloadSpec, running: Any, repeat: int, progress: Progress | None = None) -> Measured:
        measured = super().measure(workload, running, repeat, progress)
        size = self.engines[str(id(running))].spec.args.get("tensor-parallel-size", 1)
        told = {"engine_steps": 40.0} | ({"ranks_calls": 40.0 * 61, "ranks_seconds": 0.04 * size} if size > 1 else {})
        return replace(measured, run=replace(measured.run, counters={**measured.run.counters, **told}))


def test_week_13_has_the_metrics_of_its_document_in_the_report(tmp_path: Path) -> None:
    experiment = replace(load_experiment("seed-003-week13"), max_blocks=3, minimum_blocks=3)
    run_experiment(experiment, tmp_path, Ranked().bench())
    report = read_report(tmp_path)
    table = ranks(report)
    assert table is not None
    assert [(row[0].text, row[1].text) for row in table.rows] == [("latency", "three"), ("throughput", "three")]
    for row in table.rows:
        cells = dict(zip(table.headings, (cell.text for cell in row), strict=True))
        assert (cells["collectives per step"], cells["wait per step, us"]) == ("61", "3,000")
        assert cells["wait, share of the run"].endswith("%")
        assert cells["busiest rank's share of expert rows"] == "-"
    assert "### Ranks" in markdown(report, [])
