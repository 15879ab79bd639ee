"""The block pool's state machine refuses what must not happen, and names the block and its state."""

import pytest

from spillover.memory.kv.blocks import EVICTABLE, FILLING, FREE, IN_FLIGHT, READY, BlockPool


def ready(pool: BlockPool, cached: bool = False) -> int:
    block = pool.allocate()
    pool.complete(block)
    if cached:
        pool.cache(block)
    return block


def test_the_dummy_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="no block FREE"):
        pool.allocate()


def test_a_cached_block_outlives_its_holder_and_another_does_not() -> None:
    pool = BlockPool(2)
    kept, lost = ready(pool, cached=True), ready(pool)
    pool.unref(kept)
    pool.unref(lost)
    assert (pool.state(kept), pool.state(lost)) == (EVICTABLE, FREE)
    pool.ref(kept)
    assert (pool.state(kept), pool.refs(kept)) == (READY, 1)
    pool.check()


def test_reference_counts_cannot_underflow() -> None:
    pool = BlockPool(1)
    block = ready(pool, cached=True)
    pool.unref(block)
    with pytest.raises(AssertionError, match=r"unref\(\) on block 1, which is EVICTABLE with 0 references"):
        pool.unref(block)
    pool.check()


@pytest.mark.parametrize(
    "operation", ["complete", "ref", "unref", "cache", "uncache", "evict", "begin_copy", "end_copy"]
)
def test_nothing_happens_to_a_free_block_but_allocation(operation: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match=rf"{operation}\(\) on block 1, which is FREE"):
        getattr(pool, operation)(1)


def test_an_unfinished_block_is_neither_shared_nor_cached() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    for operation in (pool.ref, pool.cache, pool.evict):
        with pytest.raises(AssertionError, match="which is FILLING"):
            operation(block)
    pool.begin_copy(block)
    with pytest.raises(AssertionError, match="which is IN_FLIGHT"):
        pool.ref(block)


def test_a_block_in_use_is_not_evicted() -> None:
    pool = BlockPool(1)
    block = ready(pool, cached=True)
    with pytest.raises(AssertionError, match="which is READY with 1 references; it must be EVICTABLE"):
        pool.evict(block)


def test_a_block_in_flight_waits_for_its_copy_whatever_else_happens() -> None:
    pool = BlockPool(1)
    block = ready(pool, cached=True)
    pool.begin_copy(block)
    pool.unref(block)
    pool.uncache(block)
    assert (pool.state(block), pool.free) == (IN_FLIGHT, 0)
    for operation in (pool.evict, pool.begin_copy, pool.complete):
        with pytest.raises(AssertionError, match="which is IN_FLIGHT"):
            operation(block)
    pool.check()
    pool.end_copy(block)
    assert pool.state(block) is FREE
    pool.check()


def test_a_block_settles_after_a_copy_where_its_holders_left_it() -> None:
    pool = BlockPool(3)
    filling, held, idle = pool.allocate(), ready(pool, cached=True), ready(pool, cached=True)
    for block in (filling, held, idle):
        pool.begin_copy(block)
    pool.unref(idle)
    pool.ref(held)
    for block in (filling, held, idle):
        pool.end_copy(block)
    assert [pool.state(block) for block in (filling, held, idle)] == [FILLING, READY, EVICTABLE]
    pool.check()
