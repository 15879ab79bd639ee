"""Restore, recompute, or both: which stored blocks of a prefix are worth loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

LEARN_TOKENS = 64  # a step that prefills this many tells how long a token takes
SHARE = 0.1  # a part smaller than this share of the prefix is not worth splitting it for
WORTH = 0.8  # most time of both together over that of one way: rates are estimates, and a split costs steps


def first_to_load(
    sources: Sequence[str],
    mode: str,
    load_seconds: Callable[[str, int], float],
    compute_seconds: float,
    step_seconds: float,
    may_split: bool,
) -> int:
    """Return the first of consecutive stored blocks to load: those before it are computed. len(sources): none.

    Loading n blocks takes load_seconds(tier, n), computing them compute_seconds each. The two run at the same time, so
    the best place to meet is where both take as long; but computing takes a step more than loading alone would, which
    costs step_seconds however few its tokens; and it has to be worth it. `may_split` says whether both may be done.
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
    """How long computing takes, as steps have shown."""

    def __init__(self, token_seconds: float | None) -> None:
        self.token_seconds = token_seconds  # prefill time per token, as lately measured; None: not known
        self.step_seconds = math.inf  # time of the shortest step with a prefill

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step. A faster prefill counts at once: the slower ones before it were held up by something, such
        as their first use of a kernel."""
        if prefill_tokens:
            self.step_seconds = min(self.step_seconds, seconds)
        if prefill_tokens >= LEARN_TOKENS:
            seconds /= num_tokens
            known = self.token_seconds
            self.token_seconds = seconds if known is None or seconds < known else known + 0.1 * (seconds - known)
