"""How much of a prefix can be shared with sliding windows, compared with the plain definition."""

from hypothesis import given
from hypothesis import strategies as st

from spillover.memory.kv.windows import first_seen, usable_blocks

WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=3)


@given(st.integers(0, 200), st.none() | st.integers(1, 60), st.sampled_from([1, 4, 16]))
def test_the_first_block_seen_holds_the_oldest_position_in_the_window(position: int, window: int | None,
                                                                      size: int) -> None:
    oldest = 0 if window is None else max(0, position - window + 1)
    assert first_seen(position, window, size) == oldest // size


@given(st.data(), WINDOWS, st.sampled_from([1, 4, 16]), st.integers(0, 6))
def test_every_group_has_all_that_it_sees_after_the_blocks_that_are_shared(data: st.DataObject,
                                                                           windows: list[int | None], size: int,
                                                                           have: int) -> None:
    row = st.tuples(*(st.booleans() for _ in windows))
    rows = data.draw(st.lists(row, max_size=12))
    there = [(True,) * len(windows)] * have + rows

    def enough(count: int) -> bool:
        return all(there[i][group] for group, window in enumerate(windows)
                   for i in range(first_seen(count * size, window, size), count))

    best = max((count for count in range(have, len(there) + 1) if enough(count)), default=have)
    assert usable_blocks(rows, windows, size, have) == best - have
