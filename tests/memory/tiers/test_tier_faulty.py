"""The fault-injecting tier injects the same faults every time, and wrong bytes still never load."""

import time
from collections import Counter
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import Tier
from support.disk_calls import PAYLOAD, open_disk, some_blocks
from support.faulty_tier import FaultRates, FaultyTier
from support.null_tier import NullTier
from support.tier_calls import block_bytes, block_key, close, get, has, no_wake, put, wait

SHORT = {"slow_seconds": 0.005, "deadline_seconds": 0.01, "hang_seconds": 0.01}
MIXED = FaultRates(slow=0.1, fail=0.1, corrupt=0.1, vanish=0.1, hang=0.1)


def faulty(path: Path, seed: int, rates: FaultRates, **changes: float) -> FaultyTier:
    return FaultyTier(open_disk(path, 40), seed, rates, no_wake, **{"deadline_seconds": 0.05, **changes})


def live(tier: FaultyTier) -> tuple[Counter[str], list[bytes | None]]:
    """Store and load blocks one after another; return the injected faults, and what was loaded."""
    loaded: list[bytes | None] = []
    for number in range(60):
        put(tier, some_blocks(number % 20))
        for key in (block_key(number % 20), block_key(number % 7)):
            loaded.extend(get(tier, [key], PAYLOAD))
    return tier.injected, loaded


def test_same_seed_same_faults_and_never_a_wrong_byte(tmp_path: Path) -> None:
    tiers = [faulty(tmp_path / str(i), seed, MIXED, **SHORT) for i, seed in enumerate((1, 1, 2))]
    lives = [live(tier) for tier in tiers]
    assert lives[0] == lives[1]
    assert lives[0] != lives[2]
    assert all(lives[0][0][fault] > 3 for fault in ("slow", "fail", "corrupt", "vanish", "hang"))
    right = [block_bytes(n, PAYLOAD) for number in range(60) for n in (number % 20, number % 7)]
    for _, loaded in lives:
        assert all(got in (None, expected) for got, expected in zip(loaded, right, strict=True))
        assert any(got is not None for got in loaded)
    stats = tiers[0].stats()
    assert stats.load_failures >= lives[0][0]["corrupt"] > 0
    for tier in tiers:
        assert tier.touched_too_early == 0
        close(tier)


def test_without_faults_it_is_the_tier_below(tmp_path: Path) -> None:
    tier: Tier = faulty(tmp_path, 3, FaultRates())
    blocks = some_blocks(*range(5))
    assert tier.name == "disk"
    assert put(tier, blocks) == [True] * 5
    assert has(tier, list(blocks)) == [True] * 5
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    assert tier.evict(2).result() == 2
    assert tier.stats().blocks == 3
    tier.clear()
    assert has(tier, list(blocks)) == [False] * 5
    close(tier)


def test_hanging_load_expires_and_writes_late(tmp_path: Path) -> None:
    put(inner := open_disk(tmp_path), some_blocks(1))
    tier = FaultyTier(inner, 0, FaultRates(hang=1), no_wake, deadline_seconds=0.05, hang_seconds=0.3)
    buffer = memoryview(bytearray(PAYLOAD))
    (ticket,) = tier.load([(block_key(1), buffer)])
    ticket.cancel()
    time.sleep(0.1)
    assert ticket.expired(time.monotonic())
    assert not ticket.done()
    assert buffer == bytes(PAYLOAD)
    assert wait(tier, [ticket]) == [True]
    assert buffer == block_bytes(1, PAYLOAD)
    lookup = tier.lookup([block_key(1)])
    assert not lookup.done()
    assert wait(tier, [lookup]) == [[True]]
    assert tier.injected == {"hang": 2}
    close(tier)


def test_buffer_changed_before_its_store_is_done_is_counted(tmp_path: Path) -> None:
    tier = faulty(tmp_path, 0, FaultRates(slow=1), slow_seconds=0.2)
    buffer = memoryview(bytearray(PAYLOAD))
    (ticket,) = tier.store([(block_key(1), buffer)])
    buffer[0] = 1
    wait(tier, [ticket])
    assert tier.touched_too_early == 1
    close(tier)


def test_vanished_block_is_gone_until_stored_again(tmp_path: Path) -> None:
    put(inner := open_disk(tmp_path), some_blocks(1))
    tier = FaultyTier(inner, 0, FaultRates(vanish=1), no_wake)
    assert has(tier, [block_key(1)]) == [True]
    assert get(tier, [block_key(1)], PAYLOAD) == [None]
    assert has(tier, [block_key(1)]) == [False]
    put(tier, some_blocks(1))
    assert has(tier, [block_key(1)]) == [True]
    close(tier)


def test_close_ends_what_hangs(tmp_path: Path) -> None:
    tier = faulty(tmp_path, 0, FaultRates(hang=1), hang_seconds=600)
    tickets = tier.store([(block_key(1), memoryview(block_bytes(1, PAYLOAD)))])
    start = time.monotonic()
    close(tier)
    assert time.monotonic() - start < 10
    assert tickets[0].done()


def test_impossible_faults_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpilloverError, match="more than 1"):
        FaultyTier(NullTier(), 0, FaultRates(slow=0.6, fail=0.6), no_wake)
    with pytest.raises(SpilloverError, match="NullTier"):
        FaultyTier(NullTier(), 0, FaultRates(corrupt=0.1), no_wake)


def test_null_tier_takes_everything_and_has_nothing() -> None:
    tier: Tier = NullTier("remote")
    blocks = some_blocks(1, 2)
    assert put(tier, blocks) == [True, True]
    assert has(tier, list(blocks)) == [False, False]
    assert get(tier, list(blocks), PAYLOAD) == [None, None]
    assert tier.evict(4).result() == 0
    assert (tier.name, tier.stats().stores, tier.stats().bytes_written) == ("remote", 2, 2 * PAYLOAD)
    close(tier)
