"""The expected shape of a result, held against what was measured: it holds, it does not, or it is undecided.

Values of the same experiment are paired by pass, as the lab pairs them, and decided by an interval that may be looked
at after any block (`bench.statistics.sequential_ratio`), each expectation by itself at 95%. Values that were measured
apart, such as repeats of a command, decide only where every one of them says the same. What failed a gate of the lab
decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spillover.bench.statistics import least_blocks, sequential_ratio
from spillover.course.runs import CourseRun
from spillover.course.values import Series, series
from spillover.course.week import Expectation

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Outcome:
    expectation: Expectation
    outcome: str
    text: str  # the numbers, or why there are none
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def check(run: CourseRun) -> list[Outcome]:
    """Hold every expectation of a week, at the size of the run, against its results."""
    return [judge(run, each) for each in run.week.expect if run.scale in each.scales]


def judge(run: CourseRun, expectation: Expectation) -> Outcome:
    sides = [series(run, value) for value in (expectation.left, expectation.right) if value is not None]
    for side in sides:
        why = next((each.why for each in side if each.why), "")
        if why or len(side) != 1:
            return Outcome(expectation, UNDECIDED, _told(sides, why or f"{len(side)} values where one is asked for"))
    left, right = sides[0][0], sides[1][0] if len(sides) > 1 else None
    if expectation.at_least is not None and not any(left.values) and (right is None or all(right.values)):
        return Outcome(expectation, FAILS, f"0 in every run; at least {_number(expectation.at_least)} asked", 0.0)
    if not all(0 < number < math.inf for side in sides for number in side[0].values):
        return Outcome(expectation, UNDECIDED, "a value is 0, which no ratio describes")
    if left.passes and (right is None or right.passes) and (
            right is None or expectation.right is None or expectation.left.of == expectation.right.of):
        return _paired(expectation, left, right)
    return _apart(expectation, left.values, (1.0,) if right is None else right.values)


def _paired(expectation: Expectation, left: Series, right: Series | None) -> Outcome:
    mine = dict(zip(left.passes, left.values, strict=True))
    theirs = dict.fromkeys(mine, 1.0) if right is None else dict(zip(right.passes, right.values, strict=True))
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return Outcome(expectation, UNDECIDED, "no pass in which both were measured")
    found = sequential_ratio([mine[each] for each in common], [theirs[each] for each in common], 1, CONFIDENCE)
    least = least_blocks(CONFIDENCE)
    if found.low is None or found.high is None:
        return Outcome(expectation, UNDECIDED, f"{_number(found.value)} over {found.count} "
                       f"run{'s' * (found.count != 1)}, and at least {least} are needed", found.value)
    told = (f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)}, 95% interval over {found.count} "
            "runs)")
    return _decided(expectation, found.value, found.low, found.high, told)


def _apart(expectation: Expectation, left: Sequence[float], right: Sequence[float]) -> Outcome:
    low, high = min(left) / max(right), max(left) / min(right)
    ratio = _middle(left) / _middle(right)
    told = f"{_number(ratio)}, measured once" if low == high else (
        f"{_number(ratio)} ({_number(low)} to {_number(high)} over all pairs of {len(left)} and {len(right)} values)")
    return _decided(expectation, ratio, low, high, told)


def _decided(expectation: Expectation, ratio: float, low: float, high: float, told: str) -> Outcome:
    if expectation.at_least is not None:
        asked = f"at least {_number(expectation.at_least)} asked"
        outcome = HOLDS if low >= expectation.at_least else FAILS if high < expectation.at_least else UNDECIDED
    else:
        room = 1 + (expectation.within or 0.0)
        asked = f"{_number(1 / room)} to {_number(room)} asked"
        outcome = HOLDS if 1 / room <= low and high <= room else FAILS if high < 1 / room or low > room else UNDECIDED
    return Outcome(expectation, outcome, f"{told}; {asked}", ratio, low, high)


def _told(sides: Sequence[Sequence[Series]], why: str) -> str:
    """Return why nothing is decided, after the number that was measured all the same."""
    middles = [side[0].median or 0.0 for side in sides if len(side) == 1]
    if len(middles) < len(sides) or not all(middles):
        return why
    return f"{_number(middles[0] / (1.0, *middles[1:])[-1])}, which does not count: {why}"


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
