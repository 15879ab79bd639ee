"""Faster, slower, or no difference shown: when the lab says which.

A comparison is an arm against the baseline on one workload and one metric. Its ratio is the geometric mean over blocks
of neighbouring visits, its interval the wider of a bootstrap over blocks and Student's (`bench.statistics`).

Many comparisons find a difference somewhere by chance. Two families are therefore corrected by Holm's step-down method,
each to `1 - confidence` in all: the primary metric over arms and workloads, which gives the headline, and apart from it
all secondary metrics. The interval that is shown is the one that decided: it lies to one side of 1 exactly where the
verdict says faster or slower. No verdict is given for fewer than `minimum_blocks` blocks, nor for an arm or a baseline
that is not valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spillover.bench.statistics import block_ratios, paired_p, paired_ratio

FASTER, SLOWER, NO_DIFFERENCE, NO_VERDICT = "faster", "slower", "no difference shown", "no verdict"


# Beside all that ends in _ms. Of the same arrivals, a faster server has fewer requests under way at once.
LOWER = frozenset({"duration", "failed", "max_concurrent_requests", "mean_concurrent_requests"})


def better(metric: str) -> str:
    """Which way is good, of every name in `run_metrics.metric_names`: times are better lower, rates and shares
    higher."""
    return "lower" if metric.endswith("_ms") or metric in LOWER else "higher"


@dataclass(frozen=True)
class Comparison:
    """What was measured: `values` of the arm and `base` of the baseline, in pairs; `block` pairs make a block."""

    workload: str
    arm: str
    baseline: str
    metric: str
    primary: bool
    values: tuple[float, ...] = ()
    base: tuple[float, ...] = ()
    block: int = 1
    barred: str | None = None  # why there may be no verdict, whatever the numbers say


@dataclass(frozen=True)
class Verdict:
    comparison: Comparison
    verdict: str
    why: str | None = None  # of no verdict
    ratio: float | None = None  # arm over baseline
    low: float | None = None
    high: float | None = None
    confidence: float | None = None  # of [low, high], after Holm's correction
    p: float | None = None  # before it
    blocks: int = 0
    block_ratios: tuple[float, ...] = field(default=())

    @property
    def times(self) -> float | None:
        """How many times as good, or as bad, whichever is 1 or more."""
        return None if self.ratio is None else max(self.ratio, 1 / self.ratio)

    @property
    def range_text(self) -> str:
        """The interval as a person reads it, in the direction that the verdict names."""
        if self.low is None or self.high is None or self.ratio is None:
            return ""
        turned = (better(self.comparison.metric) == "lower") != (self.verdict == SLOWER)
        low, high = (1 / self.high, 1 / self.low) if turned else (self.low, self.high)
        return f"{_times(low)} to {_times(high)}"

    @property
    def text(self) -> str:
        comparison = self.comparison
        what = f"{comparison.arm} against {comparison.baseline} on {comparison.workload}, {comparison.metric}"
        if self.verdict == NO_VERDICT:
            return f"{what}: no verdict: {self.why}"
        level = f"{100 * (self.confidence or 0):.4g}% interval"
        if self.verdict == NO_DIFFERENCE:
            return f"{what}: no difference shown ({self.range_text}, {level}, {self.blocks} blocks)"
        assert self.times is not None
        return f"{what}: {_times(self.times)} {self.verdict} ({self.range_text}, {level}, {self.blocks} blocks)"

    def to_json(self) -> dict[str, Any]:
        comparison = self.comparison
        return {"workload": comparison.workload, "arm": comparison.arm, "baseline": comparison.baseline,
                "metric": comparison.metric, "better": better(comparison.metric), "primary": comparison.primary,
                "verdict": self.verdict, "why": self.why, "ratio": self.ratio, "low": self.low, "high": self.high,
                "confidence": self.confidence, "p": self.p, "blocks": self.blocks, "times": self.times,
                "text": self.text, "block_ratios": list(self.block_ratios)}


def decide(comparisons: Sequence[Comparison], confidence: float, minimum_blocks: int) -> list[Verdict]:
    """In the order given; the two families apart."""
    verdicts: dict[int, Verdict] = {}
    for primary in (True, False):
        family = {}
        for index, comparison in enumerate(comparisons):
            if comparison.primary == primary:
                verdicts[index] = _described(comparison, confidence, minimum_blocks)
                if verdicts[index].why is None:
                    family[index] = verdicts[index]
        verdicts.update(_holm(family, 1 - confidence))
    return [verdicts[index] for index in range(len(comparisons))]


def _described(comparison: Comparison, confidence: float, minimum_blocks: int) -> Verdict:
    """Ratio and interval for itself; with a reason where there can be no verdict. A ratio is told even then."""
    why = comparison.barred
    numbers = (*comparison.values, *comparison.base)
    if not numbers:
        return Verdict(comparison, NO_VERDICT, why or "no block in which both were measured")
    if any(not math.isfinite(value) or value <= 0 for value in numbers):
        return Verdict(comparison, NO_VERDICT, why or f"{comparison.metric} was 0 or missing in a run, which no ratio "
                                                       "describes")
    ratio = paired_ratio(comparison.values, comparison.base, comparison.block, confidence)
    if ratio.count < minimum_blocks:  # of so few, an interval would say nothing in many digits
        ratio = replace(ratio, low=None, high=None)
        why = why or f"{ratio.count} block{'s' * (ratio.count != 1)}, and at least {minimum_blocks} are needed"
    return Verdict(comparison, NO_VERDICT, why, ratio.value, ratio.low, ratio.high,
                   confidence if ratio.low is not None else None,
                   paired_p(comparison.values, comparison.base, comparison.block), ratio.count,
                   tuple(block_ratios(comparison.values, comparison.base, comparison.block)))


def _holm(family: dict[int, Verdict], alpha: float) -> dict[int, Verdict]:
    """The smallest p is held to alpha / m, the next to alpha / (m - 1), until one fails; the rest fail with it."""
    decided: dict[int, Verdict] = {}
    failed: float | None = None  # the level at which the first failed, which the rest are shown at
    for rank, (index, verdict) in enumerate(sorted(family.items(), key=lambda item: item[1].p or 0.0)):
        level = failed if failed is not None else alpha / (len(family) - rank)
        comparison = verdict.comparison
        ratio = paired_ratio(comparison.values, comparison.base, comparison.block, 1 - level)
        assert ratio.low is not None
        assert ratio.high is not None
        shown = replace(verdict, low=ratio.low, high=ratio.high, confidence=1 - level, verdict=NO_DIFFERENCE)
        if failed is None and not ratio.low <= 1 <= ratio.high:
            good = (ratio.value > 1) == (better(comparison.metric) == "higher")
            shown = replace(shown, verdict=FASTER if good else SLOWER)
        else:
            failed = level
        decided[index] = shown
    return decided


def _times(ratio: float) -> str:
    digits = 3 if 0.95 < ratio < 1.05 else 2 if ratio < 10 else 1
    return f"{ratio:.{digits}f}x"
