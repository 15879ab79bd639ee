"""Restore, recompute, or both: which stored blocks of a prefix are worth loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A part smaller than this share of the prefix is not worth splitting it for: a split takes steps of its own, each with
# costs that do not shrink with its tokens.
SHARE = 0.2
MIN_COMPUTED = 64  # tokens: a step with less is bounded by the weights it reads, not by its tokens


def first_to_load(
    sources: Sequence[str],
    mode: str,
    load_seconds: Callable[[str, int], float],
    compute_seconds: float,
    block_size: int,
    may_split: bool,
) -> int:
    """Of consecutive stored blocks the first to load: those before it are computed meanwhile. len(sources): none.

    Loading n blocks takes load_seconds(tier, n), computing them compute_seconds each. The two run at the same time, so
    the best place to meet is where both take as long; `may_split` says whether they may.
    """
    blocks = len(sources)
    if mode == "never" or not blocks:
        return blocks
    if mode == "always":
        return 0
    loading = sum(load_seconds(tier, sources.count(tier)) for tier in set(sources))
    computing = compute_seconds * blocks
    if not may_split:
        return 0 if loading <= computing else blocks
    computed = round(blocks * loading / (loading + computing)) if loading + computing > 0 else 0
    if computed < SHARE * blocks or computed * block_size < MIN_COMPUTED:
        return 0 if loading <= computing or computed else blocks
    if blocks - computed < SHARE * blocks:
        return blocks
    return computed
