"""Metrics of records, compared with numbers computed by hand; and the steady-state window."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.bench.serving.serving_metrics import concurrency, gaps, mean_level, measure, steady_window, tpot


def record(index: int, sent: float, times: list[float], counts: list[int] | None = None, scheduled: float | None = None,
           error: str | None = None) -> RequestRecord:
    counts = counts or [1] * len(times)
    return RequestRecord(index, sent if scheduled is None else scheduled, sent, tuple(zip(times, counts, strict=True)),
                         times[-1] if times else sent, 10, sum(counts), sum(counts), error)


def run_of(*records: RequestRecord, closed: bool = False) -> Run:
    first, last = min(one.sent for one in records), max(one.done for one in records)
    return Run(records, 0.0, last - first, ClientHealth(), steady_window(records, closed))


def test_definitions_by_hand() -> None:
    a = record(0, 1.0, [1.5, 1.6, 2.0], scheduled=0.8)  # TTFT 0.5, TPOT 0.25, E2EL 1.0
    b = record(1, 2.0, [2.3, 2.9], counts=[1, 3])  # TTFT 0.3, TPOT 0.2, E2EL 0.9
    c = record(2, 2.0, [], error="lost")
    whole = measure(run_of(a, b, c), {"ttft": 0.4, "tpot": 0.3}, ranks=(50.0, 100.0))
    assert (whole.completed, whole.failed, whole.prompt_tokens, whole.output_tokens) == (2, 1, 20, 7)
    assert whole.ttft.mean == pytest.approx(0.4)
    assert whole.ttft_scheduled.mean == pytest.approx(0.5)
    assert whole.tpot.percentiles[100.0] == pytest.approx(0.25)
    assert whole.e2el.median == pytest.approx(0.95)
    assert sorted(np.concatenate([gaps(a), gaps(b)])) == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.4])
    assert whole.itl.count == 5
    assert whole.duration == pytest.approx(1.9)
    assert whole.request_throughput == pytest.approx(2 / 1.9)
    assert whole.output_throughput == pytest.approx(7 / 1.9)
    assert whole.total_token_throughput == pytest.approx(27 / 1.9)
    assert whole.peak_output_throughput == 5  # from 1.0 s: 2 tokens; the one at 2.0 is in the next second
    assert (whole.goodput, whole.attainment) == (pytest.approx(1 / 1.9), pytest.approx(1 / 3))


def test_an_answer_of_one_token_has_no_tpot_and_meets_any() -> None:
    one = record(0, 0.0, [0.1])
    assert tpot(one) is None
    whole = measure(run_of(one), {"tpot": 0.0})
    assert (whole.tpot.count, whole.attainment) == (0, 1.0)
    assert math.isnan(whole.tpot.mean)
    assert whole.tpot.to_json()["mean"] is None


def test_tokens_of_the_first_chunk_came_with_no_gap() -> None:
    assert gaps(record(0, 0.0, [1.0, 1.5], [2, 1])).tolist() == [0.0, 0.5]
    assert gaps(record(0, 0.0, [1.0, 1.5, 1.7], [1, 0, 1])).tolist() == pytest.approx([0.7])


def test_concurrency_over_time() -> None:
    levels = concurrency([record(0, 0.0, [4.0]), record(1, 1.0, [2.0]), record(2, 2.0, [3.0])])
    assert levels[:, 1].max() == 2, "one that ends when another begins makes room for it"
    assert mean_level(levels, (0.0, 4.0)) == pytest.approx(1.5)
    assert mean_level(levels, (1.0, 3.0)) == pytest.approx(2.0)
    assert mean_level(levels, (3.5, 5.5)) == pytest.approx(0.25)


def test_the_window_leaves_out_the_climb_and_the_end() -> None:
    records = [record(place, 0.1 * place, [0.1 * place + 2.0]) for place in range(200)]  # 10 per second, 20 at once
    begin, end = steady_window(records, closed=False)
    assert end == pytest.approx(19.9)
    assert begin == pytest.approx(1.99, abs=0.1)  # a tenth of the time, within which 20 are reached
    slow = [replace(one, done=one.sent + 5.0, chunks=((one.sent + 5.0, 1),)) for one in records]
    assert steady_window(slow, closed=False)[0] == pytest.approx(4.9, abs=0.2)  # when 50 are reached
    steady = measure(run_of(*records), window=(begin, end))
    assert steady.request_throughput == pytest.approx(10.0, rel=0.02)
    assert steady.mean_concurrency == pytest.approx(20.0, rel=0.02)


def test_a_burst_has_no_steady_state() -> None:
    burst = [record(place, 0.001 * place, [1.0 + place]) for place in range(10)]
    assert steady_window(burst, closed=False) == (0.0, 10.0)
    assert steady_window([], closed=True) == (0.0, 0.0)


def test_a_run_without_an_answer() -> None:
    whole = measure(run_of(record(0, 0.0, [], error="no")), {"ttft": 1.0})
    assert (whole.completed, whole.failed, whole.output_throughput, whole.attainment) == (0, 1, 0.0, 0.0)


def test_a_run_comes_back_from_json_as_it_was() -> None:
    run = run_of(record(0, 0.0, [0.1, 0.2], [1, 2]), record(1, 0.1, [], error="e"))
    run = replace(run, records=(*run.records, replace(run.records[0], index=2, sources={"host": 3}, session=1, turn=2,
                                                      timings={"queue": 0.5}, text="t")))
    assert Run.from_json(run.to_json()) == run


def test_a_burst_is_measured_to_its_last_answer() -> None:
    """A burst has no steady state: its window is the whole run, and the metrics of both are equal."""
    burst = run_of(*(record(index, 0.001 * index, [0.5 + 0.1 * index, 1.0 + 0.1 * index]) for index in range(8)))
    whole, steady = measure(burst), measure(burst, window=burst.window)
    assert steady.duration == pytest.approx(whole.duration)
    assert (steady.completed, steady.output_tokens, steady.ttft.count) == (8, 16, 8)
    assert steady.request_throughput == pytest.approx(whole.request_throughput)
