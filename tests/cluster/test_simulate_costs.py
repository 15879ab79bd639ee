"""Step costs of simulated replicas: fitted to measured steps, kept in files; and comparisons with real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.simulate import calibration, costs
from spillover.cluster.simulate.costs import Fit, Measured, Point, StepCosts, StepLoad, fit, read_costs
from spillover.errors import SpilloverError

LOADS = [StepLoad(prefill, prefill * prefill / 2, rows, rows * context) for prefill in (0, 16, 128, 512)
         for rows in (0, 1, 8, 32) for context in (10, 500) if prefill or rows]


@given(made=st.builds(StepCosts, *(st.sampled_from(values) for values in (
    (1e-3, 0.02), (1e-5, 3e-4), (0.0, 1e-8), (1e-5, 2e-4), (0.0, 1e-7)))))
@settings(max_examples=20, deadline=None)
def test_costs_that_made_the_points_are_found_again(made: StepCosts) -> None:
    found = fit([Point(load, made.seconds(load)) for load in LOADS])
    assert found.worst_error < 1e-6
    for load in LOADS:
        assert found.costs.seconds(load) == pytest.approx(made.seconds(load), rel=1e-6)


@given(seconds=st.lists(st.floats(1e-4, 1.0), min_size=len(LOADS), max_size=len(LOADS)))
@settings(max_examples=30, deadline=None)
def test_no_cost_is_ever_negative_whatever_was_measured(seconds: list[float]) -> None:
    found = fit([Point(load, each) for load, each in zip(LOADS, seconds, strict=True)])
    assert min(vars(found.costs).values()) >= 0
    assert 0 <= found.mean_error <= found.worst_error


def test_a_cost_file_brings_back_what_was_measured(tmp_path: Path) -> None:
    made = StepCosts(0.01, 1e-4, 0.0, 2e-4, 1e-7)
    measured = Measured(fit([Point(load, made.seconds(load)) for load in LOADS]), "here", "a model", 0.001, 0.002, 4096,
                        16, 500, 8, 256)
    (tmp_path / "costs.json").write_text(json.dumps(costs.as_json(measured)))
    read = read_costs(str(tmp_path / "costs.json"))
    assert read.fit == measured.fit
    assert [getattr(read, name) for name in costs.SETTINGS] == [getattr(measured, name) for name in costs.SETTINGS]
    # Without points the coefficients are used.
    (tmp_path / "few.json").write_text(json.dumps({**costs.as_json(measured), "points": []}))
    assert read_costs(str(tmp_path / "few.json")).fit == Fit(measured.fit.costs)


@pytest.mark.parametrize(("change", "words"), [
    ({"format": "other/1"}, "its format is 'other/1'"),
    ({"points": [{"prefill_tokens": 1}]}, "prefill_pairs"),
    ({"points": [{"prefill_tokens": 1, "prefill_pairs": 1, "decode_rows": 0, "decode_context": 0, "seconds": 0}]},
     "a step of 0 seconds"),
    ({"points": [], "coefficients": {"step": -1}}, "-1 where seconds should be"),
    ({"points": [], "coefficients": {"step": float("nan")}}, "nan where seconds should be"),
    ({"points": 7}, "not a cost file"),
])
def test_what_is_no_cost_file_is_said_in_a_sentence(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    whole = costs.as_json(Measured(Fit(StepCosts(0.01)), "here"))
    (tmp_path / "costs.json").write_text(json.dumps({**whole, **change}))
    with pytest.raises(SpilloverError, match="not a cost file") as refused:
        read_costs(str(tmp_path / "costs.json"))
    assert words in str(refused.value)


def test_errors_of_real_runs_are_told_worst_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert calibration.read_calibration(None) is None
    point = {"workload": "tenants", "replicas": 2, "policy": "predicted", "rate": 12,
             "measured": {"ttft_mean": 0.2, "requests_per_second": 10.0, "hit_rate": 0.0},
             "predicted": {"ttft_mean": 0.21, "requests_per_second": 9.2, "hit_rate": 0.0}}
    made = {"format": calibration.FORMAT, "date": "2026-01-02T00:00:00", "step": "4,0.05", "points": [point]}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(made))
    found = calibration.read_calibration(str(path))
    assert found is not None
    assert found.points[0].errors == pytest.approx({"ttft_mean": 0.05, "requests_per_second": -0.08})
    assert "within 8.0% of the measured, 1 runs of 2 replicas" in found.lines()[0]
    path.write_text(json.dumps({**made, "format": "none"}))
    with pytest.raises(SpilloverError, match=r"not a file of benchmarks/simulate\.py"):
        calibration.read_calibration(str(path))
