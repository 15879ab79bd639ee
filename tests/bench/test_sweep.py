"""Rates from one at a time to saturation, on a server with a known limit: 4 at once, 0.1 s each, so 40 per second."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from spillover.bench.serving.load import OVER_SATURATED, LoadOptions
from spillover.bench.serving.load_processes import run_load
from spillover.bench.serving.openai_api import Dialect
from spillover.bench.serving.saturation import SaturationWatch, piles_up
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.sweep import Sweep, SweepPlan
from spillover.bench.workloads.arrivals import Arrivals
from spillover.errors import SpilloverError
from support.servers.mock_server import MockServer

pytestmark = pytest.mark.alone

LIMIT = 40.0


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(ttft=0.07, itl=0.01, slots=4) as server:
        yield server


def requests(step: int, count: int = 400) -> list[ServeRequest]:
    return [ServeRequest((step, index), 2, 4, extra={"mock": {"id": step}}) for index in range(count)]


def test_a_sweep_finds_the_limit_and_the_rate_that_keeps_a_promise(mock: MockServer) -> None:
    plan = SweepPlan(steps=5, max_concurrency=12, burstiness=math.inf, seconds=0.8, goodput={"ttft": 0.1},
                     attainment=0.9, refine=1)
    sweep = Sweep(requests, LoadOptions(mock.url, dialect=Dialect(model="mock")), plan)
    kinds = [step.kind for step in sweep.run()]
    result = sweep.result()
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert kinds[:3] == ["synchronous", "throughput", "rate"]
    assert found["synchronous_rate"] == pytest.approx(10.0, rel=0.25)
    assert found["max_request_throughput"] == pytest.approx(LIMIT, rel=0.25)
    rates = [step.rate for step in result.steps if step.kind == "rate"]
    assert rates == sorted(rates), "upwards"
    assert result.max_rate is not None
    assert result.max_rate >= 15
    assert len({step.run.details["url"] for step in result.steps}) == 1
    assert {entry["id"] for entry in mock.log()} >= set(range(len(result.steps))), "each step has prompts of its own"


def test_a_run_above_the_limit_stops_early_and_one_below_does_not(mock: MockServer,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillover.bench.serving.saturation.MIN_SECONDS", 1.5)

    def run_at(rate: float, seconds: float) -> str | None:
        options = LoadOptions(mock.url, Arrivals(rate, math.inf), Dialect(), stop_when_saturated=True)
        stopped: str | None = run_load(requests(99, round(rate * seconds)), options).details["stopped"]
        return stopped

    assert run_at(0.7 * LIMIT, 2.5) is None
    assert run_at(2.0 * LIMIT, 30.0) == OVER_SATURATED


def test_what_piles_up_and_what_only_wanders() -> None:
    rng = np.random.default_rng(0)
    times = np.linspace(0, 20, 400)
    wandering = [(at, 10 + 3 * math.sin(at) + rng.normal(), 0.1 + 0.02 * rng.normal()) for at in times]
    growing = [(at, 2 + 3 * at + rng.normal(), 0.1 + 0.05 * at + 0.02 * rng.normal()) for at in times]
    assert not piles_up(wandering)
    assert piles_up(growing)
    assert not piles_up(growing[:10]), "too few to tell"
    assert not piles_up([(at, running, 0.1) for at, running, _ in growing]), "the time to first token must grow as well"
    watch = SaturationWatch()
    for sample in growing:
        watch.note(sample[0], int(sample[1]), sample[2])
    assert watch.is_saturated()


def test_plans_that_make_no_sense() -> None:
    with pytest.raises(SpilloverError, match="--steps"):
        SweepPlan(steps=2)
    with pytest.raises(SpilloverError, match="--attainment"):
        SweepPlan(attainment=0.0)


def test_a_server_that_gains_nothing_from_batches_is_swept_from_far_below(mock: MockServer) -> None:
    plan = SweepPlan(steps=4, max_concurrency=1, burstiness=math.inf, seconds=0.4)
    sweep = Sweep(requests, LoadOptions(mock.url, dialect=Dialect()), plan)
    rates = [step.rate for step in sweep.run() if step.rate is not None]
    assert rates[0] == pytest.approx(sweep.steps[1].reached / 2, rel=0.3)
