"""The block pool's state machine rejects invalid transitions, and names the block and its state."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.memory.kv.blocks import EVICTABLE, FILLING, FREE, IN_FLIGHT, READY, BlockPool

OPERATIONS = ["complete", "ref", "unref", "cache", "uncache", "evict", "begin_copy", "end_copy"]


def ready(pool: BlockPool, cached: bool = False) -> int:
    (block,) = pool.allocate(1)
    pool.complete([block])
    if cached:
        pool.cache([block])
    return block


def test_the_dummy_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2) + pool.allocate(1)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="of 1 blocks with 0 FREE"):
        pool.allocate(1)


def test_a_cached_block_outlives_its_holder_and_another_does_not() -> None:
    pool = BlockPool(2)
    kept, lost = ready(pool, cached=True), ready(pool)
    pool.unref([kept])
    pool.unref([lost])
    assert (pool.state(kept), pool.state(lost)) == (EVICTABLE, FREE)
    pool.ref([kept])
    assert (pool.state(kept), pool.refs(kept)) == (READY, 1)
    pool.check()


def test_reference_counts_cannot_underflow() -> None:
    pool = BlockPool(1)
    block = ready(pool, cached=True)
    pool.unref([block])
    with pytest.raises(AssertionError, match=r"unref\(\) on block 1, which is EVICTABLE with 0 references"):
        pool.unref([block])
    pool.check()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_happens_to_a_free_block_but_allocation(operation: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match=rf"{operation}\(\) on block 1, which is FREE"):
        getattr(pool, operation)([1])


def test_an_unfinished_block_is_neither_shared_nor_cached() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    for operation in (pool.ref, pool.cache, pool.evict):
        with pytest.raises(AssertionError, match="which is FILLING"):
            operation([block])
    pool.begin_copy([block])
    with pytest.raises(AssertionError, match="which is IN_FLIGHT"):
        pool.ref([block])


def test_a_block_in_use_is_not_evicted() -> None:
    pool = BlockPool(1)
    block = ready(pool, cached=True)
    with pytest.raises(AssertionError, match="which is READY with 1 references; it must be EVICTABLE"):
        pool.evict([block])


def test_a_block_in_flight_waits_for_its_copy_whatever_else_happens() -> None:
    pool = BlockPool(1)
    block = ready(pool, cached=True)
    pool.begin_copy([block])
    pool.unref([block])
    pool.uncache([block])
    assert (pool.state(block), pool.free) == (IN_FLIGHT, 0)
    for operation in (pool.evict, pool.begin_copy, pool.complete):
        with pytest.raises(AssertionError, match="which is IN_FLIGHT"):
            operation([block])
    pool.check()
    pool.end_copy([block])
    assert pool.state(block) is FREE
    pool.check()


def test_a_block_settles_after_a_copy_where_its_holders_left_it() -> None:
    pool = BlockPool(3)
    (filling,), held, idle = pool.allocate(1), ready(pool, cached=True), ready(pool, cached=True)
    for block in (filling, held, idle):
        pool.begin_copy([block])
    pool.unref([idle])
    pool.ref([held])
    for block in (filling, held, idle):
        pool.end_copy([block])
    assert [pool.state(block) for block in (filling, held, idle)] == [FILLING, READY, EVICTABLE]
    pool.check()


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_a_run_of_blocks_is_what_its_blocks_are_one_by_one(rng: random.Random, steps: int) -> None:
    """Runs of blocks, legal or not, end in the same states as single blocks, and fail for the same reason."""
    runs, singles = BlockPool(6), BlockPool(6)
    for _ in range(steps):
        name = rng.choice(OPERATIONS)
        refused: list[str | None] = [None, None]
        if rng.random() < 0.1:
            count = rng.randint(0, runs.free)
            assert runs.allocate(count) == [block for _ in range(count) for block in singles.allocate(1)]
        else:
            blocks = rng.sample(range(1, 7), rng.randint(0, 6))
            try:
                getattr(runs, name)(blocks)
            except AssertionError as error:
                refused[0] = str(error)
            try:
                for block in blocks:
                    getattr(singles, name)([block])
            except AssertionError as error:
                refused[1] = str(error)
        assert refused[0] == refused[1]
        for block in range(1, 7):
            assert runs.state(block) is singles.state(block)
            assert (runs.refs(block), runs.cached(block)) == (singles.refs(block), singles.cached(block))
        runs.check()
        singles.check()
