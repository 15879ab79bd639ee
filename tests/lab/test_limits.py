"""A run's percentage of its machine's limit: the least time for its work divided by the time it was busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from spillover.bench.target import Bound
from spillover.lab.limits import Reached, busy_seconds, most_at_once, reached
from support.lab.fake_lab import make_run


class OneTokenASecond:
    """Limits at which reading is free and each computed token takes a second of arithmetic."""

    memory_rate = 1e9
    matrix_rate = 1.0

    def step(self, batch: Sequence[tuple[int, int]]) -> Bound:
        tokens = float(sum(new for new, _ in batch))
        return Bound(tokens, 0.0, tokens, "compute")

    def again(self) -> OneTokenASecond:
        return self

    def mean(self, other: object) -> OneTokenASecond:
        return self


def test_waiting_for_requests_is_not_work() -> None:
    run = make_run(count=3, gap=10.0)  # each 0.24 s long
    assert busy_seconds(run.records) == pytest.approx(3 * 0.24)
    assert most_at_once(run.records) == 1
    crowded = make_run(count=3, gap=0.1)
    assert busy_seconds(crowded.records) == pytest.approx(0.2 + 0.24)
    assert most_at_once(crowded.records) == 3


def test_the_share_is_of_what_had_to_be_computed() -> None:
    run = make_run(count=2, gap=10.0, ttft=100.0, tpot=10.0)  # 100 prompt tokens, 8 output tokens, 170 s each
    assert reached(run, OneTokenASecond()).percent == pytest.approx(100 * 2 * 107 / (10 + 170))
    half = replace(run, records=tuple(replace(record, sources={"computed": 50, "host": 50}) for record in run.records))
    assert reached(half, OneTokenASecond()).percent == pytest.approx(100 * 2 * 57 / (10 + 170))
    assert reached(run, OneTokenASecond()).bound == "compute"


def test_what_is_not_known_is_a_dash() -> None:
    assert reached(make_run(), None).text == "-"
    assert Reached(63.2, "memory").text == "63% (memory)"
    assert Reached(108.0, "compute").text == "108% (compute)"
