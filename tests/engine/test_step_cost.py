"""A server without a model: its steps take the requested time, one after another."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.engine.null_runner import NullRunner
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.token_ids import token_array
from spillover.engine.step import NewRequest, Phase, Step, StepItem
from spillover.engine.step_cost import StepCost


@given(step=st.floats(0.1, 50), token=st.floats(0, 10), counts=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_steps_end_one_after_the_other(step: float, token: float, counts: list[int]) -> None:
    cost = StepCost.of(f"{step},{token}")
    runner = NullRunner([1, 2, 3], cost=cost)
    began, ends = time.monotonic(), 0.0
    request = NewRequest(1, token_array(range(5000)), 5000, SamplingParams(), 0, ())
    for place, count in enumerate(counts):
        item = StepItem(1, Phase.PREFILL, 0, count, 0, 0, ((),))
        launched = runner.launch(Step((item,), (request,) if place == 0 else ()))
        taken = (step + token * count) / 1e3
        assert launched.ends >= max(began, ends) + taken - 1e-9  # no step begins before the previous one completes
        ends = launched.ends
    assert ends <= time.monotonic() + sum(step + token * count for count in counts) / 1e3 + 1e-9
    runner.close()


def test_without_a_cost_steps_end_at_once() -> None:
    runner = NullRunner([1])
    assert runner.launch(Step(())).ends == 0.0
    runner.close()
    with pytest.raises(Exception, match="two numbers"):
        StepCost.of("fast")
