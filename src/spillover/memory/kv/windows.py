"""Sliding windows in blocks: the blocks that the next position sees, and how much of a prefix can be shared."""

from collections.abc import Sequence


def first_seen(position: int, window: int | None, block_size: int) -> int:
    """Return the index of the first block that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def usable_blocks(rows: Sequence[Sequence[object]], windows: Sequence[int | None], block_size: int,
                  have: int = 0) -> int:
    """Return the maximum number of blocks after the first `have` that can be shared such that every layer group has all
    blocks that the next position sees. A row is one block: an entry per layer group, false if the group lacks it."""
    gap = next((index for index, row in enumerate(rows) if not all(row)), len(rows))
    if gap == len(rows) or not any(windows):
        return gap
    usable = gap
    run = [have + gap] * len(windows)  # per group: number of consecutive blocks present up to here
    for count, row in enumerate(rows[gap:], start=have + gap + 1):
        enough = True
        for group, window in enumerate(windows):
            run[group] = run[group] + 1 if row[group] else 0
            enough = enough and run[group] >= count - first_seen(count * block_size, window, block_size)
        if enough:
            usable = count - have
    return usable
