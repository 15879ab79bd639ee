"""Several disks form one tier: keys are spread by size, are found after a restart, and survive the loss of one disk."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers.disks import Disks
from support.disk_calls import PAYLOAD, open_disk, room_for, some_blocks
from support.tier_calls import block_key, close, get, has, put

SIZES = {"a": 24, "b": 48, "c": 96}  # slots: each disk can hold everything that a test stores at once


def open_striped(root: Path, names: str = "abc") -> Disks:
    return Disks([open_disk(root / name, SIZES[name]) for name in names])


def test_blocks_spread_and_come_back(tmp_path: Path) -> None:
    tier = open_striped(tmp_path)
    blocks = some_blocks(*range(20))
    assert put(tier, blocks) == [True] * 20
    assert has(tier, [*blocks, block_key(99)]) == [True] * 20 + [False]
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    stats = tier.stats()
    assert (stats.blocks, stats.stores, stats.loads, stats.bytes_read) == (20, 20, 20, 20 * PAYLOAD)
    assert stats.capacity_bytes == sum(room_for(slots) for slots in SIZES.values())
    assert tier.max_blocks() == sum(SIZES.values())
    assert sum(disk.stats().blocks > 0 for disk in tier.disks) >= 2
    tier.check()
    close(tier)
    tier = open_striped(tmp_path, "cab")
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values()), "the order of the flags does not matter"
    tier.clear()
    assert has(tier, list(blocks)) == [False] * 20
    close(tier)


def test_homes_follow_the_sizes_and_stay_when_a_disk_comes(tmp_path: Path) -> None:
    tier, fewer = open_striped(tmp_path), open_striped(tmp_path / "fewer", "a")
    keys = [block_key(number) for number in range(4000)]
    homes = [tier.disk_of(key) for key in keys]
    share = Counter(homes)
    weights = [disk.capacity_bytes for disk in tier.disks]
    for i, weight in enumerate(weights):
        assert share[i] / len(keys) == pytest.approx(weight / sum(weights), abs=0.03)
    close(fewer)
    close(tier)
    two = open_striped(tmp_path, "bc")
    names = {key: "abc"[home] for key, home in zip(keys, homes, strict=True)}
    assert all("bc"[two.disk_of(key)] == names[key] for key in keys if names[key] != "a")
    close(two)


def test_lost_disk_loses_only_its_own_blocks(tmp_path: Path) -> None:
    tier = open_striped(tmp_path)
    blocks = some_blocks(*range(20))
    put(tier, blocks)
    gone = {key for key in blocks if tier.disk_of(key) == 2}
    assert 0 < len(gone) < 20
    close(tier)
    shutil.rmtree(tmp_path / "c")
    tier = open_striped(tmp_path)
    assert get(tier, list(blocks), PAYLOAD) == [None if key in gone else value for key, value in blocks.items()]
    close(tier)


def test_eviction_takes_from_all_in_proportion(tmp_path: Path) -> None:
    tier = open_striped(tmp_path)
    put(tier, some_blocks(*range(24)))
    before = [disk.stats().blocks for disk in tier.disks]
    assert tier.evict(12).result() == 12
    after = [disk.stats().blocks for disk in tier.disks]
    assert all(abs(left - held / 2) <= 1 for held, left in zip(before, after, strict=True))
    assert tier.evict(100).result() == 12
    assert tier.stats().blocks == 0
    close(tier)


def test_damage_reaches_the_right_disk(tmp_path: Path) -> None:
    tier = open_striped(tmp_path)
    blocks = some_blocks(1, 2, 3)
    put(tier, blocks)
    assert tier.damage(block_key(2), 77)
    assert not tier.damage(block_key(9), 77)
    assert get(tier, list(blocks), PAYLOAD) == [blocks[block_key(1)], None, blocks[block_key(3)]]
    close(tier)


def test_no_disk_at_all_is_refused() -> None:
    with pytest.raises(SpilloverError, match="at least one"):
        Disks([])
