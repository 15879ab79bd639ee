"""Intervals and verdicts, compared with closed forms, and checked on made-up results to be right often enough."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from spillover.eval.compare import BETTER, NO_DIFFERENCE, WORSE, compare, mcnemar
from spillover.eval.metrics import Metric, estimate, wilson

ACC = Metric("acc", "acc")
PERPLEXITY = Metric("perplexity", "logprob", "tokens", "lower", "perplexity")


@pytest.mark.parametrize(("only_base", "only_other"), [(0, 0), (1, 0), (3, 9), (9, 3), (10, 10), (40, 61), (300, 401)])
def test_mcnemar_is_the_exact_binomial_test(only_base: int, only_other: int) -> None:
    count = only_base + only_other
    weights = [math.comb(count, k) for k in range(count + 1)]
    as_unlikely = sum(weight for weight in weights if weight <= weights[only_base])  # the rule of scipy.stats.binomtest
    assert mcnemar(only_base, only_other) == pytest.approx(float(Fraction(as_unlikely, 2**count)))


def test_wilsons_interval_is_the_solution_of_its_equation() -> None:
    for right, count in ((0, 10), (3, 10), (93, 200), (200, 200)):
        low, high = wilson(right, count)
        for bound in (low, high):  # where the score test just rejects
            if 0 < bound < 1:
                assert (right / count - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / count)
        assert low <= right / count <= high
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = {"share": 0, "perplexity": 0}
    for _ in range(50):
        found = estimate(ACC, [{"acc": float(hit)} for hit in rng.random(100) < 0.3])
        held["share"] += found.low <= 0.3 <= found.high
        assert found.method == "wilson"
        items = [{"logprob": -2.0 * n + rng.normal(0, math.sqrt(n)), "tokens": n} for n in rng.integers(50, 100, 60)]
        found = estimate(PERPLEXITY, items)
        held["perplexity"] += found.low <= math.exp(2.0) <= found.high
        assert found.method == "bootstrap"
    assert held["share"] >= 44
    assert held["perplexity"] >= 44


def items(hits: list[int]) -> dict[str, dict[str, float]]:
    return {str(index): {"acc": float(hit)} for index, hit in enumerate(hits)}


def test_verdicts_of_accuracy() -> None:
    base, worse = items([1] * 60 + [0] * 40), items([0] * 20 + [1] * 40 + [0] * 40)
    (found,) = compare([("t", [ACC], base, worse)])
    assert (found.verdict, found.only_base, found.only_other, found.items) == (WORSE, 20, 0, 100)
    assert found.p == pytest.approx(2 * 0.5**20)
    assert found.low < -0.2 < found.high < 0
    assert compare([("t", [ACC], worse, base)])[0].verdict == BETTER
    assert compare([("t", [ACC], base, base)])[0].verdict == NO_DIFFERENCE
    near = items([1] * 60 + [0] * 35 + [1] * 5)
    (found,) = compare([("t", [ACC], base, near)])
    assert (found.verdict, found.p) == (NO_DIFFERENCE, 0.0625)


def test_only_shared_items_are_compared() -> None:
    (found,) = compare([("t", [ACC], items([1, 0, 1]), items([1, 0]))])
    assert (found.items, found.base, found.other) == (2, 0.5, 0.5)


def windows(seed: int, shift: float, spread: float = 0.0) -> dict[str, dict[str, float]]:
    hard, rng = np.random.default_rng(7), np.random.default_rng(seed)
    return {str(n): {"logprob": -100 * (2 + hard.normal(0, 0.5) + shift + rng.normal(0, spread)), "tokens": 100.0}
            for n in range(40)}


def test_verdicts_of_perplexity_are_paired() -> None:
    base, off = windows(1, 0.0), windows(2, 0.02, 0.01)
    apart = [estimate(PERPLEXITY, list(each.values())) for each in (base, off)]
    assert apart[1].low < apart[0].value, "one by one nothing could be told"
    (found,) = compare([("t", [PERPLEXITY], base, off)])
    assert (found.verdict, found.test, found.only_base) == (WORSE, "paired bootstrap", None)
    assert compare([("t", [PERPLEXITY], off, base)])[0].verdict == BETTER
    assert compare([("t", [PERPLEXITY], base, base)])[0].verdict == NO_DIFFERENCE
    assert compare([("t", [PERPLEXITY], base, windows(3, 0.0, 0.05))])[0].verdict == NO_DIFFERENCE


def test_few_pairs_decide_little() -> None:
    worse_by = [0.001, 0.002, 0.003, 0.012]  # all in one direction, so that the bootstrap alone would be certain
    base = {str(n): {"logprob": -200.0, "tokens": 100.0} for n in range(4)}
    off = {str(n): {"logprob": -200.0 - 100 * worse, "tokens": 100.0} for n, worse in enumerate(worse_by)}
    (found,) = compare([("t", [PERPLEXITY], base, off)])
    t = np.mean(worse_by) / (np.std(worse_by, ddof=1) / 2)
    assert found.p == pytest.approx(_student_tail(t), rel=0.01)  # approximately, of the logarithms
    assert found.p > 0.1
    assert found.verdict == NO_DIFFERENCE
    assert found.low < 0 < found.high
    one = {"0": base["0"]}
    (alone,) = compare([("t", [PERPLEXITY], one, off)])
    assert (alone.p, alone.verdict, alone.high) == (1.0, NO_DIFFERENCE, math.inf)
    assert estimate(PERPLEXITY, [base["0"]]).high == math.inf


def _student_tail(t: float) -> float:
    """Return P(|T| > t) with 3 degrees of freedom, in closed form."""
    x = t / math.sqrt(3)
    return 1 - 2 / math.pi * (x / (1 + x * x) + math.atan(x))


def test_intervals_of_few_windows_hold_the_truth_too() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        found = estimate(PERPLEXITY, [{"logprob": 100 * rng.normal(-2, 0.1), "tokens": 100.0} for _ in range(4)])
        held += found.low <= math.exp(2) <= found.high
    assert held >= 88


def test_more_comparisons_need_more() -> None:
    base, other = items([1] * 50 + [0] * 50), items([0] * 8 + [1] * 42 + [0] * 48 + [1] * 2)  # p is 0.109
    strong = items([0] * 8 + [1] * 42 + [0] * 50)  # p is 0.0078
    assert compare([("t", [ACC], base, other)])[0].verdict == NO_DIFFERENCE
    assert compare([("t", [ACC], base, strong)])[0].verdict == WORSE
    assert {each.verdict for each in compare([(name, [ACC], base, strong) for name in "abcdefgh"])} == {NO_DIFFERENCE}


def test_equal_models_seldom_get_a_verdict() -> None:
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(40):
        shared = rng.random(150) < 0.5
        one, two = (np.where(rng.random(150) < 0.2, rng.random(150) < 0.5, shared) for _ in range(2))
        wrong += compare([("t", [ACC], items(one.tolist()), items(two.tolist()))])[0].verdict != NO_DIFFERENCE
    assert wrong <= 5
