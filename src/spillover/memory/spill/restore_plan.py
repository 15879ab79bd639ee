"""Restore, recompute, or both: which stored blocks of a prefix are worth loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

LEARN_TOKENS = 64  # minimum number of prefill tokens in a step that updates the estimate of time per token
SHARE = 0.1  # minimum share of the prefix that either part must have, for it to be split
WORTH = 0.8  # maximum ratio of the time with a split to that without: rates are estimates, and a split costs steps


def first_to_load(
    sources: Sequence[str],
    mode: str,
    load_seconds: Callable[[str, int], float],
    compute_seconds: float,
    step_seconds: float,
    may_split: bool,
) -> int:
    """Return the index of the first of consecutive stored blocks to load: those before it are computed; len(sources) if
    none is to be loaded. Loading n blocks takes load_seconds(tier, n), computing them compute_seconds each. Both run
    concurrently, so the best split is where both take equally long. But a split needs one more step than loading alone,
    which takes step_seconds however few its tokens, and must save enough time. `may_split`: whether a split is allowed.
    """
    blocks = len(sources)
    if mode == "never" or not blocks:
        return blocks
    if mode == "always":
        return 0
    loading = sum(load_seconds(tier, sources.count(tier)) for tier in set(sources))
    computing = compute_seconds * blocks
    one_way = 0 if loading <= computing else blocks
    if not may_split or loading + computing == 0:
        return one_way
    both = loading * computing / (loading + computing) + step_seconds
    computed = round(blocks * loading / (loading + computing))
    if both >= WORTH * min(loading, computing) or not SHARE * blocks <= computed <= (1 - SHARE) * blocks:
        return one_way
    return computed


class ComputeCost:
    """The time that computing takes, measured from completed steps."""

    def __init__(self, token_seconds: float | None) -> None:
        self.token_seconds = token_seconds  # recently measured prefill time per token; None if unknown
        self.step_seconds = math.inf  # time of the shortest step with a prefill

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Update from a completed step. A faster prefill is adopted at once: the slower ones before it were delayed by
        something, such as the first use of a kernel."""
        if prefill_tokens:
            self.step_seconds = min(self.step_seconds, seconds)
        if prefill_tokens >= LEARN_TOKENS:
            seconds /= num_tokens
            known = self.token_seconds
            self.token_seconds = seconds if known is None or seconds < known else known + 0.1 * (seconds - known)
