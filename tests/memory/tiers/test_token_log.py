"""Logged tokens are read back unchanged, or not at all, whatever happens to the file."""

from __future__ import annotations

import logging
import random
from array import array
from pathlib import Path

import pytest

from spillover.engine.tiers import LoggedDisk
from spillover.memory.kv.digest import root_digest
from spillover.memory.tiers.folder import CacheFolder
from spillover.memory.tiers.prune import prune
from spillover.memory.tiers.seal import PLAIN, KeyedSeal, Seal
from spillover.memory.tiers.token_log import LEAST_BYTES, SHARE, TokenLog
from support.tier_calls import block_bytes, block_key, close, no_wake, put

IDENTITY = b"a model"
KEYED = KeyedSeal(b"sixteen bytes or more")
SMALL = LEAST_BYTES * SHARE  # a disk with the smallest possible log

Said = list[tuple[bytes, array]]


def made(folder: Path, capacity: int = 1 << 30, seal: Seal = PLAIN) -> TokenLog:
    log = TokenLog(folder, capacity, IDENTITY, seal)
    log.path.parent.mkdir(parents=True, exist_ok=True)
    return log


def kept(folder: Path, said: Said, capacity: int = 1 << 30, seal: Seal = PLAIN) -> TokenLog:
    log = made(folder, capacity, seal)
    list(log.load())
    for index, (salt, tokens) in enumerate(said):
        log.append(salt, tokens)
        if index % 100 == 99:  # at most 100 records may be pending
            log.close(10.0)
            log = made(folder, capacity, seal)
            list(log.load())
    log.close(10.0)
    return log


def records(rng: random.Random, count: int, most: int = 60) -> Said:
    salts = [root_digest(b"suffix", salt) for salt in (None, "a", "b")]
    return [(rng.choice(salts), array("i", [rng.randrange(50000) for _ in range(rng.randint(1, most))]))
            for _ in range(count)]


@pytest.mark.parametrize("seal", [PLAIN, KEYED], ids=["checksum", "key"])
def test_what_was_said_comes_back_in_order_and_goes_on(tmp_path: Path, seal: Seal) -> None:
    said = records(random.Random(1), 40)
    kept(tmp_path, said[:25], seal=seal)
    kept(tmp_path, said[25:], seal=seal)
    assert list(made(tmp_path, seal=seal).load()) == said
    other = TokenLog(tmp_path, 1 << 30, b"another model", seal)
    assert list(other.load()) == []
    assert made(tmp_path, seal=seal).path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seed", range(60))
def test_damage_costs_the_records_that_it_hits_and_no_other(seed: int, tmp_path: Path,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    seal = rng.choice([PLAIN, KEYED])
    said = records(rng, 12)
    log = kept(tmp_path, said, seal=seal)
    data = bytearray(log.path.read_bytes())
    length = 40 + seal.nbytes
    ends = [sum(length + 4 * len(tokens) for _, tokens in said[:count]) for count in range(1, len(said) + 1)]
    assert ends[-1] == len(data)
    starts = [0, *ends[:-1]]
    kind = rng.choice(["flip", "cut", "noise", "insert"])
    at = rng.randrange(len(data))
    stop = len(data) if kind == "cut" else min(len(data), at + (1 if kind == "flip" else rng.randint(1, 200)))
    if kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randint(1, 100))
        stop = at + 1
    else:
        data[at:stop] = bytes(byte ^ rng.randint(1, 255) for byte in data[at:stop])
    log.path.write_bytes(data)
    whole = [record for record, start, end in zip(said, starts, ends, strict=True) if end <= at or start >= stop]
    with caplog.at_level(logging.WARNING):
        found = list(made(tmp_path, seal=seal).load())
    hit = [record for record in said if record not in whole]
    assert [record for record in found if record not in hit] == whole  # an insert between two records damages none
    assert all(record in said for record in found)
    assert "damaged" in caplog.text or kind == "cut"
    more = records(rng, 3)
    kept(tmp_path, more, seal=seal)
    assert list(made(tmp_path, seal=seal).load()) == found + more


@pytest.mark.parametrize("seed", range(10))
def test_the_file_is_bounded_and_the_newest_stays(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    said = records(rng, 300, most=rng.choice([30, 200, 3000]))
    log = made(tmp_path, SMALL)
    assert log.most_bytes == LEAST_BYTES
    for record in said:
        log = kept(tmp_path, [record], SMALL)
        assert log.path.stat().st_size <= LEAST_BYTES
    found = list(made(tmp_path, SMALL).load())
    room = LEAST_BYTES // 2 - 48
    expected = [(salt, tokens[-(room // 4):]) for salt, tokens in said]
    assert found
    assert found == expected[-len(found):]
    assert sum(48 + 4 * len(tokens) for _, tokens in found) >= LEAST_BYTES // 2 - 4 * 3000 or len(found) == 1


def test_a_record_of_another_seal_or_a_link_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = records(random.Random(2), 5)
    forged = kept(tmp_path / "forged", said)
    log = made(tmp_path, seal=KEYED)
    log.path.write_bytes(forged.path.read_bytes())
    assert list(log.load()) == []
    log.path.unlink()
    log.path.symlink_to(forged.path)
    assert list(log.load()) == []
    kept(tmp_path, said, seal=KEYED)  # nor is the link written through
    assert list(made(tmp_path / "forged").load()) == said
    assert "cannot be written" in caplog.text


def test_it_goes_with_its_blocks(tmp_path: Path) -> None:
    said = records(random.Random(3), 5)
    log = TokenLog(tmp_path, 1 << 30, IDENTITY)
    disk = LoggedDisk(tmp_path, 1 << 20, 4096, IDENTITY, {"model": "m"}, no_wake)
    disk.tokens = log
    for salt, tokens in said:
        log.append(salt, tokens)
    put(disk, {block_key(1): block_bytes(1, 4096)})
    close(disk)
    assert list(TokenLog(tmp_path, 1 << 30, IDENTITY).load()) == said, "it is written before the tier is closed"
    folder = CacheFolder.of(tmp_path, IDENTITY)
    assert folder.small_bytes() > log.path.stat().st_size
    prune(tmp_path, identity=IDENTITY.hex())
    assert not log.path.exists()
    assert not folder.path.exists()


def test_a_small_disk_has_none(tmp_path: Path) -> None:
    log = made(tmp_path, SMALL - SHARE)
    assert log.most_bytes == 0
    log.append(bytes(32), array("i", [1, 2, 3]))
    log.close(1.0)
    assert not log.path.exists()
