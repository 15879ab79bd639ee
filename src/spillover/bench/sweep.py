"""A sweep of load from one request at a time up to the maximum: peak throughput, and the rate that meets objectives.

The first two steps send requests one after the other, and as many at once as allowed. Evenly spaced rates between the
two measured ones follow in open loop, ascending, until the server no longer keeps up. With objectives, the highest rate
that meets them is then narrowed down by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spillover.bench.records import Run
from spillover.bench.serving.load import OVER_SATURATED, Live, LoadOptions
from spillover.bench.serving.load_processes import run_load
from spillover.bench.serving.saturation import piles_up
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.serving_metrics import ServingMetrics, concurrency, measure, ttft
from spillover.bench.workloads.arrivals import Arrivals
from spillover.errors import SpilloverError

SYNCHRONOUS, THROUGHPUT, OPEN, REFINED = "synchronous", "throughput", "rate", "refined"


@dataclass(frozen=True)
class SweepPlan:
    steps: int = 10  # number of steps, including the first two
    max_concurrency: int = 256  # concurrency of the throughput step
    burstiness: float = 1.0
    seconds: float | None = 30.0  # seconds of sending per step
    goodput: Mapping[str, float] | None = None  # objectives in seconds
    attainment: float = 0.99  # share of requests that must meet the objectives
    refine: int = 2  # bisections between the last rate that meets the objectives and the first that does not
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 3:
            raise SpilloverError(f"--steps must be at least 3: one at a time, all at once, and a rate between; got "
                                 f"{self.steps}")
        if not 0 < self.attainment <= 1:
            raise SpilloverError(f"--attainment is a share above 0, up to 1; got {self.attainment}")


@dataclass(frozen=True)
class Step:
    kind: str
    rate: float | None  # offered requests per second; None in closed loop
    whole: ServingMetrics
    steady: ServingMetrics
    run: Run
    saturated: bool

    @property
    def name(self) -> str:
        return self.kind if self.rate is None else f"{self.rate:.3g} req/s"

    @property
    def reached(self) -> float:
        """Return the answered requests per second."""
        return max(self.whole.request_throughput, self.steady.request_throughput)

    def keeps(self, attainment: float) -> bool:
        """Return whether enough requests met the objectives, and all of them were answered."""
        share = self.whole.attainment
        return share is not None and share >= attainment and not self.saturated and not self.whole.failed

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "rate": self.rate, "saturated": self.saturated, "whole": self.whole.to_json(),
                "steady_state": self.steady.to_json(), "client": self.run.client.to_json(),
                "counters": dict(self.run.counters), "details": dict(self.run.details)}


@dataclass(frozen=True)
class SweepResult:
    plan: SweepPlan
    steps: tuple[Step, ...]

    @property
    def best(self) -> Step:
        """Return the step with the most output tokens per second."""
        return max(self.steps, key=lambda step: max(step.whole.output_throughput, step.steady.output_throughput))

    @property
    def max_rate(self) -> float | None:
        """Return the highest offered rate that met the objectives; None if none did or none were given."""
        return max((step.rate for step in self.steps if step.rate is not None and step.keeps(self.plan.attainment)),
                   default=None)

    @property
    def saturation_rate(self) -> float | None:
        """Return the lowest rate that the server did not keep up with; None if it kept up with all."""
        return min((step.rate for step in self.steps if step.rate is not None and step.saturated), default=None)

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "synchronous_rate": self.steps[0].reached,
            "max_request_throughput": max(step.reached for step in self.steps),
            "max_output_throughput": max(best.whole.output_throughput, best.steady.output_throughput),
            "max_throughput_step": best.name,
            "saturation_rate": self.saturation_rate,
            "goodput_objectives": None if self.plan.goodput is None else dict(self.plan.goodput),
            "min_attainment": self.plan.attainment,
            "max_rate_under_objectives": self.max_rate,
            "steps": [step.to_json() for step in self.steps],
        }


Watch = Callable[[str, int], Callable[[Live], None]]  # (a step's name, its number of requests) -> progress callback


class Sweep:
    """A sweep over rates: `requests(step)` must return new prompts for each step, or the prefix cache is measured."""

    def __init__(self, requests: Callable[[int], list[ServeRequest]], options: LoadOptions, plan: SweepPlan,
                 watch: Watch | None = None) -> None:
        self._requests, self._options, self._plan = requests, options, plan
        self._watch: Watch = watch or (lambda name, count: lambda live: None)
        self.steps: list[Step] = []

    def run(self) -> Iterator[Step]:
        """Yield each step as it completes; all are in `result()` afterwards."""
        plan = self._plan
        alone = self._step(SYNCHRONOUS, Arrivals(max_concurrency=1, self_timed=False))
        yield alone
        full = self._step(THROUGHPUT, Arrivals(max_concurrency=plan.max_concurrency, self_timed=False))
        yield full
        low, high = sorted((alone.reached, full.reached))
        if not high > 0:
            raise SpilloverError("no request of the first two steps was answered" + (
                f", the first with: {alone.run.failed[0].error}" if alone.run.failed else "; raise --max-seconds"))
        if low > high / 2:  # batching gains nothing: there are no rates between the two
            low = 0.0
        for rate in np.linspace(low, high, plan.steps - 1)[1:]:
            step = self._open(OPEN, float(rate))
            yield step
            if step.saturated:
                break
        for _ in range(plan.refine if plan.goodput else 0):
            rate = self._between()
            if rate is None:
                break
            yield self._open(REFINED, rate)

    def result(self) -> SweepResult:
        return SweepResult(self._plan, tuple(self.steps))

    def _between(self) -> float | None:
        """Return the rate halfway between the highest that met the objectives and the lowest above it that did not."""
        kept = self.result().max_rate
        tried = [step for step in self.steps if step.rate is not None and not step.keeps(self._plan.attainment)]
        above = [step.rate for step in tried if step.rate is not None and (kept is None or step.rate > kept)]
        if not above:
            return None
        low = kept if kept is not None else self.steps[0].reached / 2
        return (low + min(above)) / 2 if min(above) > low else None

    def _open(self, kind: str, rate: float) -> Step:
        return self._step(kind, Arrivals(rate, self._plan.burstiness, self_timed=False,
                                         seed=self._plan.seed + len(self.steps)), rate)

    def _step(self, kind: str, arrivals: Arrivals, rate: float | None = None) -> Step:
        plan, place = self._plan, len(self.steps)
        requests = self._requests(place)
        options = replace(self._options, arrivals=arrivals, seconds=plan.seconds, stop_when_saturated=rate is not None)
        run = run_load(requests, options, self._watch(kind if rate is None else f"{rate:.3g} req/s", len(requests)))
        saturated = rate is not None and (run.details["stopped"] == OVER_SATURATED or run_piles_up(run))
        step = Step(kind, rate, measure(run, plan.goodput), measure(run, plan.goodput, run.window), run, saturated)
        self.steps.append(step)
        return step


def run_piles_up(run: Run) -> bool:
    """Return whether requests pile up, judged as during a run, on all samples up to the last request sent."""
    records = sorted(run.completed, key=lambda record: record.chunks[0][0])
    levels = concurrency(run.records)
    last = max((record.sent for record in records), default=-math.inf)
    samples = [(at, float(levels[np.searchsorted(levels[:, 0], at, side="right") - 1, 1]), ttft(record))
               for record in records if (at := record.chunks[0][0]) <= last]
    return piles_up(samples)
