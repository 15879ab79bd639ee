"""Checks of the expected shape of a result against the measurements: it holds, does not hold, or is undecided.

Values of the same experiment are paired by pass, as in the lab, and decided by an interval that may be inspected after
any block (`bench.statistics.sequential_ratio`), each expectation by itself at 95%. Values measured separately, such as
repeats of a command, decide only if all of them agree. Values that failed a gate of the lab decide nothing, nor do arms
of two engines: such a ratio compares the engines and not the topic of the week.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spillover.bench.statistics import least_blocks, sequential_ratio
from spillover.course.runs import CourseRun
from spillover.course.values import Series, series
from spillover.course.week import Expectation
from spillover.lab.store import Results

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
CONFIDENCE = 0.95
AGREE = 5  # number of runs that must agree if there is no ratio: by chance they do once in 2**5


@dataclass(frozen=True)
class Outcome:
    expectation: Expectation
    outcome: str
    text: str  # the numbers, or why there are none
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    open: bool = False  # whether the check is undecided and more runs may decide it


def decision_rule(run: CourseRun, experiment: str) -> Callable[[Results], bool]:
    """Return a predicate: whether all expectations of an experiment are decided, as far as more runs can do it."""
    expectations = [each for each in run.week.expect if run.scale in each.scales
                    and experiment in (each.left.of, each.right.of if each.right is not None else None)]

    def is_decided(_results: Results) -> bool:
        now = CourseRun(run.folder, run.week, run.scale, run.engine)  # a new object reads the current results
        return not any(judge(now, each).open for each in expectations)

    return is_decided


def check(run: CourseRun) -> list[Outcome]:
    """Check every expectation of a week, at the size of the run, against its results."""
    return [judge(run, each) for each in run.week.expect if run.scale in each.scales]


def judge(run: CourseRun, expectation: Expectation) -> Outcome:
    engines = _engines(run, expectation)
    if len(engines) > 1:
        measured = "; ".join(f"{', '.join(sorted(arms))} by {engine}" for engine, arms in sorted(engines.items()))
        return Outcome(expectation, UNDECIDED, f"two engines are compared: {measured}")
    sides = [series(run, value) for value in (expectation.left, expectation.right) if value is not None]
    for side in sides:
        why = next((each.why for each in side if each.why), "")
        if why or len(side) != 1:
            why = why or f"{len(side)} values where one is needed"
            return Outcome(expectation, UNDECIDED, _undecided_text(sides, why),
                           open=len(side) == 1 and side[0].passing)
    left, right = sides[0][0], sides[1][0] if len(sides) > 1 else None
    if not all(0 < number < math.inf for side in sides for number in side[0].values):
        return _with_zeros(expectation, left, right)
    if left.passes and (right is None or right.passes) and (
            right is None or expectation.right is None or expectation.left.of == expectation.right.of):
        return _paired(expectation, left, right)
    return _by_ranges(expectation, left.values, (1.0,) if right is None else right.values)


def _engines(run: CourseRun, expectation: Expectation) -> dict[str, set[str]]:
    """Return the arms that an expectation compares, grouped by the engine that runs them."""
    switched = {step.name: step.engines.get(run.engine, {}) for step in run.week.experiments}
    found: dict[str, set[str]] = {}
    for value in (expectation.left, *((expectation.right,) if expectation.right is not None else ())):
        for arm in value.arms if value.of in switched else ():
            found.setdefault(run.engine if arm in switched[value.of] else "spillover", set()).add(arm)
    return found


def _paired(expectation: Expectation, left: Series, right: Series | None) -> Outcome:
    mine = dict(zip(left.passes, left.values, strict=True))
    theirs = dict.fromkeys(mine, 1.0) if right is None else dict(zip(right.passes, right.values, strict=True))
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return Outcome(expectation, UNDECIDED, "no pass in which both were measured", open=True)
    found = sequential_ratio([mine[each] for each in common], [theirs[each] for each in common], 1, CONFIDENCE)
    least = least_blocks(CONFIDENCE)
    if found.low is None or found.high is None:
        return Outcome(expectation, UNDECIDED, f"{_number(found.value)} over {found.count} "
                       f"run{'s' * (found.count != 1)}, and at least {least} are needed", found.value, open=True)
    measured = (f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)}, "
                f"95% interval over {found.count} runs)")
    return _decided(expectation, found.value, found.low, found.high, measured)


def _with_zeros(expectation: Expectation, left: Series, right: Series | None) -> Outcome:
    """Decide if a value is 0 or infinite, so that there is no ratio: by runs that all agree."""
    least = expectation.at_least
    if least is None or (right is not None and left.passes != right.passes):
        return Outcome(expectation, UNDECIDED, "a value is 0, which no ratio describes")
    theirs = (1.0,) * len(left.values) if right is None else right.values
    enough = [mine > 0 and mine >= least * base for mine, base in zip(left.values, theirs, strict=True)]
    sums = f"{_number(sum(left.values))} against {_number(sum(theirs))} in all"
    measured = f"{sum(enough)} of {len(enough)} runs reach it, {sums}; at least {_number(least)} times as much expected"
    if any(enough) and not all(enough):
        return Outcome(expectation, UNDECIDED, measured)
    if len(enough) < AGREE:
        return Outcome(expectation, UNDECIDED, f"{measured}, in at least {AGREE} runs", open=True)
    return Outcome(expectation, HOLDS if enough[0] else FAILS, measured)


def _by_ranges(expectation: Expectation, left: Sequence[float], right: Sequence[float]) -> Outcome:
    low, high = min(left) / max(right), max(left) / min(right)
    ratio = _middle(left) / _middle(right)
    measured = f"{_number(ratio)}, measured once" if low == high else (
        f"{_number(ratio)} ({_number(low)} to {_number(high)} over all pairs of {len(left)} and {len(right)} values)")
    return replace(_decided(expectation, ratio, low, high, measured), open=False)


def _decided(expectation: Expectation, ratio: float, low: float, high: float, measured: str) -> Outcome:
    if expectation.at_least is not None:
        goal = f"at least {_number(expectation.at_least)} expected"
        outcome = HOLDS if low >= expectation.at_least else FAILS if high < expectation.at_least else UNDECIDED
    else:
        room = 1 + (expectation.within or 0.0)
        goal = f"{_number(1 / room)} to {_number(room)} expected"
        outcome = HOLDS if 1 / room <= low and high <= room else FAILS if high < 1 / room or low > room else UNDECIDED
    return Outcome(expectation, outcome, f"{measured}; {goal}", ratio, low, high, open=outcome == UNDECIDED)


def _undecided_text(sides: Sequence[Sequence[Series]], why: str) -> str:
    """Return why nothing is decided, preceded by the measured number if there is one."""
    middles = [side[0].median or 0.0 for side in sides if len(side) == 1]
    if len(middles) < len(sides) or not all(middles):
        return why
    return f"{_number(middles[0] / (1.0, *middles[1:])[-1])}, which does not count: {why}"


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
