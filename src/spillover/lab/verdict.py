"""Verdicts: faster, slower, same, or undecided; and whether enough blocks have been measured.

A comparison is an arm against the baseline on one workload and one metric. Its ratio is the geometric mean over blocks
of neighbouring runs, its interval an anytime-valid confidence sequence over blocks (`bench.statistics`): checking after
every block and stopping at the first that decides does not make a wrong verdict more likely.

Many comparisons find a difference somewhere by chance. There are two families: the primary metric over arms and
workloads, which gives the headline, and separately all secondary metrics. All intervals of a family hold simultaneously
with the experiment's confidence (each is made at `1 - confidence` over their number), and a verdict claims only what
its interval shows:

- faster, slower: the interval excludes 1;
- same: the interval is within `equivalence` of 1, whether or not it excludes 1;
- no difference shown: neither, so far.

No verdict is given for fewer than `minimum_blocks` blocks, nor for an arm or a baseline that is not valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spillover.bench.statistics import block_ratios, blocks_to_decide, least_blocks, sequential_ratio

FASTER, SLOWER, SAME = "faster", "slower", "same"
NO_DIFFERENCE, NO_VERDICT = "no difference shown", "no verdict"
DECIDED = (FASTER, SLOWER, SAME)

# Besides names ending in _ms. With the same arrivals, a faster server has fewer requests in flight.
LOWER = frozenset({"duration", "failed", "max_concurrent_requests", "mean_concurrent_requests"})


def better(metric: str) -> str:
    """Return which direction is better for a name of `run_metrics.metric_names`: "lower" or "higher"."""
    return "lower" if metric.endswith("_ms") or metric in LOWER else "higher"


@dataclass(frozen=True)
class Comparison:
    """The data of a comparison: `values` of the arm and `base` of the baseline in pairs, `block` pairs per block."""

    workload: str
    arm: str
    baseline: str
    metric: str
    primary: bool
    values: tuple[float, ...] = ()
    base: tuple[float, ...] = ()
    block: int = 1
    no_verdict_reason: str | None = None  # why there can be no verdict, regardless of the values


@dataclass(frozen=True)
class Rule:
    """The rule of verdicts, fixed before the first run. `equivalence`: the smallest relevant difference, as a share."""

    confidence: float
    minimum_blocks: int
    equivalence: float = 0.0  # 0 for never the same

    def level(self, comparisons: int) -> float:
        """Return the confidence of each interval of a family, so that all of them hold together with `confidence`."""
        return 1 - (1 - self.confidence) / max(1, comparisons)

    def least_blocks(self, comparisons: int) -> int:
        return max(self.minimum_blocks, least_blocks(self.level(comparisons)))


@dataclass(frozen=True)
class Verdict:
    comparison: Comparison
    verdict: str
    why: str | None = None  # why there is no verdict
    ratio: float | None = None  # arm over baseline
    low: float | None = None
    high: float | None = None
    confidence: float | None = None  # confidence of [low, high], such that the whole family holds
    p: float | None = None  # anytime-valid, for this comparison alone
    blocks: int = 0
    equivalence: float = 0.0
    block_ratios: tuple[float, ...] = field(default=())

    @property
    def final(self) -> bool:
        """Return whether more blocks would not change it: it is decided, or cannot be decided any more."""
        return self.verdict in DECIDED or (self.verdict == NO_VERDICT and not self.early)

    @property
    def early(self) -> bool:
        """Return whether the only reason for no verdict is too few blocks."""
        known = self.comparison.no_verdict_reason is not None
        return self.verdict == NO_VERDICT and not known and not _unsound(self.comparison)

    @property
    def times(self) -> float | None:
        """Return the ratio or its inverse, whichever is 1 or more."""
        return None if self.ratio is None else max(self.ratio, 1 / self.ratio)

    @property
    def word(self) -> str:
        """Return the verdict as displayed."""
        return f"same within {100 * self.equivalence:g}%" if self.verdict == SAME else self.verdict

    @property
    def range_text(self) -> str:
        """Return the interval as displayed: times better, or times worse if the verdict is slower."""
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
        interval = f"{self.range_text}, {100 * (self.confidence or 0):.4g}% interval"
        if self.verdict == NO_DIFFERENCE:
            return f"{what}: no difference shown, undecided after {self.blocks} blocks ({interval})"
        if self.verdict == SAME:
            return f"{what}: {self.word} after {self.blocks} blocks ({interval})"
        assert self.times is not None
        return f"{what}: {_times(self.times)} {self.verdict} after {self.blocks} blocks ({interval})"

    def blocks_left(self, most: int) -> int:
        """Estimate how many more blocks will decide it, if they vary as the earlier ones; `most` limits their total."""
        if self.final:
            return 0
        known = [math.log(ratio) for ratio in self.block_ratios]
        if len(known) < 2 or self.ratio is None or self.confidence is None:
            return max(1, most - self.blocks)
        middle = sum(known) / len(known)
        spread = math.sqrt(sum((each - middle) ** 2 for each in known) / (len(known) - 1))
        return max(1, blocks_to_decide(self.ratio, spread, self.confidence, self.equivalence, most) - self.blocks)

    def to_json(self) -> dict[str, Any]:
        comparison = self.comparison
        return {"workload": comparison.workload, "arm": comparison.arm, "baseline": comparison.baseline,
                "metric": comparison.metric, "better": better(comparison.metric), "primary": comparison.primary,
                "verdict": self.verdict, "word": self.word, "why": self.why, "ratio": self.ratio, "low": self.low,
                "high": self.high, "confidence": self.confidence, "p": self.p, "blocks": self.blocks,
                "times": self.times, "equivalence": self.equivalence, "final": self.final, "text": self.text,
                "block_ratios": list(self.block_ratios)}


def decide(comparisons: Sequence[Comparison], rule: Rule) -> list[Verdict]:
    """Decide comparisons in the order given; the two families separately."""
    verdicts: dict[int, Verdict] = {}
    for primary in (True, False):
        family = {index: each for index, each in enumerate(comparisons) if each.primary == primary}
        judged = sum(each.no_verdict_reason is None for each in family.values())
        verdicts.update({index: _decide(each, rule, judged) for index, each in family.items()})
    return [verdicts[index] for index in range(len(comparisons))]


def _decide(comparison: Comparison, rule: Rule, family: int) -> Verdict:
    """Decide one comparison. `family`: number of comparisons judged together. A ratio is always given."""
    why = comparison.no_verdict_reason
    if not comparison.values:
        return Verdict(comparison, NO_VERDICT, why or "no block in which both were measured")
    if _unsound(comparison):
        return Verdict(comparison, NO_VERDICT, why or f"{comparison.metric} was 0 or missing in a run, so there is no "
                                                       "ratio")
    level, least = rule.level(family), rule.least_blocks(family)
    found = sequential_ratio(comparison.values, comparison.base, comparison.block, level, rule.minimum_blocks)
    if found.count < least:
        why = why or (f"{found.count} block{'s' * (found.count != 1)}, and at least {least} are needed")
    verdict = Verdict(comparison, NO_VERDICT, why, found.value, found.low, found.high, level, found.p, found.count,
                      rule.equivalence, tuple(block_ratios(comparison.values, comparison.base, comparison.block)))
    if why is not None or found.low is None or found.high is None:
        return verdict
    if 1 / (1 + rule.equivalence) < found.low and found.high < 1 + rule.equivalence:
        return replace(verdict, verdict=SAME)
    if found.low <= 1 <= found.high:
        return replace(verdict, verdict=NO_DIFFERENCE)
    good = (found.low > 1) == (better(comparison.metric) == "higher")
    return replace(verdict, verdict=FASTER if good else SLOWER)


def _unsound(comparison: Comparison) -> bool:
    return any(not 0 < value < math.inf for value in (*comparison.values, *comparison.base))


def _times(ratio: float) -> str:
    digits = 3 if 0.95 < ratio < 1.05 else 2 if ratio < 10 else 1
    return f"{ratio:.{digits}f}x"
