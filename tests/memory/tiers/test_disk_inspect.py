"""`spill cache ls|verify|prune` list all caches, find every flipped bit, and free space."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spillover.errors import SpilloverError
from spillover.memory.tiers.inspect import BadRecord, list_caches, verify
from spillover.memory.tiers.prune import prune
from support.disk_calls import PAYLOAD, bytes_under, open_disk, some_blocks
from support.tier_calls import DESCRIPTION, IDENTITY, OTHER_IDENTITY, block_bytes, block_key, close, get, has, put


def fill(path: Path, numbers: range, identity: bytes = IDENTITY, slots: int = 100) -> None:
    tier = open_disk(path, slots, identity=identity)
    for number in numbers:
        assert put(tier, some_blocks(number)) == [True]
    close(tier)


def bad_records(path: Path) -> list[BadRecord]:
    return [step.bad for step in verify(path) if step.bad is not None]


def test_list_says_what_is_there(tmp_path: Path) -> None:
    before = time.time() - 1
    fill(tmp_path, range(6))
    fill(tmp_path, range(2), OTHER_IDENTITY)
    (tmp_path / "abcd").mkdir()  # of another program, though its name is hex
    (tmp_path / "notes.txt").write_text("hello")
    os.utime(tmp_path / IDENTITY.hex() / "description.json", (before + 500, before + 500))
    first, second = list_caches(tmp_path)
    assert (first.identity, first.blocks) == (IDENTITY.hex(), 6)
    assert (second.identity, second.blocks) == (OTHER_IDENTITY.hex(), 2)
    assert first.description == DESCRIPTION
    assert 6 * PAYLOAD < first.nbytes < bytes_under(tmp_path)
    assert before < second.last_use < first.last_use


def test_list_and_verify_leave_no_trace(tmp_path: Path) -> None:
    fill(tmp_path, range(5))
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    list_caches(tmp_path)
    steps = list(verify(tmp_path))
    assert [(step.checked, step.total) for step in steps] == [(i, 5) for i in range(1, 6)]
    assert steps[-1].nbytes == 5 * PAYLOAD
    assert bad_records(tmp_path) == []
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before


def test_verify_finds_a_flipped_bit_wherever_it_is(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    (path,) = tmp_path.rglob("*.kv")
    original = path.read_bytes()
    draw = random.Random(3)
    places = [8192 + slot * 8192 + draw.randrange(PAYLOAD) for slot in range(4) for _ in range(5)]
    headers = [4096 + slot * 256 + draw.randrange(256) for slot in range(4)]
    for offset in places + headers:
        changed = bytearray(original)
        changed[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        (bad,) = bad_records(tmp_path)
        assert bad.file == path
        if offset in places:
            slot = (offset - 8192) // 8192
            assert (bad.key, bad.offset) == (block_key(slot), 8192 + slot * 8192)
        else:
            assert (bad.key, bad.offset) == (None, 4096 + (offset - 4096) // 256 * 256)


def test_verify_names_a_segment_that_cannot_be_opened(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    fill(tmp_path, range(2), OTHER_IDENTITY)
    path = next((tmp_path / IDENTITY.hex()).glob("*.kv"))
    original = path.read_bytes()
    damaged = [original[:offset] + b"\xff" + original[offset + 1 :] for offset in range(0, 88, 8)]
    for content in [*damaged, b"", original[:50], original[:5000]]:  # the last one ends within the headers
        path.write_bytes(content)
        steps = list(verify(tmp_path))
        (bad,) = [step.bad for step in steps if step.bad is not None]
        assert (bad.file, bad.offset, bad.key) == (path, 0, None)
        assert "segment" in bad.reason
        assert steps[-1].checked == steps[-1].total == 2  # the other cache is read nevertheless
    path.write_bytes(original)
    assert bad_records(tmp_path) == []


def test_verify_one_cache_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    fill(tmp_path, range(2), OTHER_IDENTITY)
    assert len(list(verify(tmp_path, IDENTITY.hex()[:6]))) == 3
    for name in ("ff", "0"):
        with pytest.raises(SpilloverError, match=r"begins.* with.*there are 00010203.*, 01020304"):
            verify(tmp_path, name)
    with pytest.raises(SpilloverError, match="no disk cache"):
        list_caches(tmp_path / "missing")


def test_list_and_verify_beside_a_server_that_writes(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=8)
    put(tier, some_blocks(0))
    stop = threading.Event()
    problems: list[object] = []
    rounds = 0

    def look() -> None:
        nonlocal rounds
        try:
            while not stop.is_set():
                assert list_caches(tmp_path)[0].blocks <= 8
                problems.extend(bad_records(tmp_path))
                rounds += 1
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    deadline = time.monotonic() + 20
    number = 0
    while (rounds < 20 or number < 500) and time.monotonic() < deadline and not problems:
        number += 3
        put(tier, some_blocks(number, number + 1, number + 2))
    stop.set()
    thread.join(20)
    assert problems == []
    assert rounds >= 5
    with pytest.raises(SpilloverError, match=rf"in use by process {os.getpid()}; stop that one before pruning"):
        prune(tmp_path, size=0)
    close(tier)


def test_prune_to_a_size_keeps_the_last_used_and_frees_the_space(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=100)
    for number in range(20):
        put(tier, some_blocks(number))
    get(tier, [block_key(0)], PAYLOAD)
    close(tier)
    before = bytes_under(tmp_path)
    pruned = prune(tmp_path, size=before // 2)
    after = bytes_under(tmp_path)
    assert after <= before // 2 + 16
    assert pruned.nbytes == before - after
    tier = open_disk(tmp_path, slots=100)
    left = tier.stats().blocks
    assert left == 20 - pruned.blocks
    assert 6 <= left < 12
    expected = [0, *range(21 - left, 20)]
    assert get(tier, [block_key(n) for n in expected], PAYLOAD) == [block_bytes(n, PAYLOAD) for n in expected]
    assert bad_records(tmp_path) == []
    put(tier, some_blocks(50))
    close(tier)


def test_prune_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time()
    now = clock - 1000
    monkeypatch.setattr(time, "time", lambda: now)
    fill(tmp_path, range(5))
    now = clock - 500
    tier = open_disk(tmp_path, slots=100)
    put(tier, some_blocks(7))
    get(tier, [block_key(2)], PAYLOAD)
    close(tier)
    now = clock
    assert prune(tmp_path, older_than=2000).blocks == 0
    assert prune(tmp_path, older_than=700).blocks == 4
    tier = open_disk(tmp_path, slots=100)
    assert has(tier, [block_key(n) for n in (0, 1, 2, 3, 4, 7)]) == [False, False, True, False, False, True]
    close(tier)
    assert prune(tmp_path, older_than=300).blocks == 2
    assert list_caches(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_prune_one_identity(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    fill(tmp_path, range(2), OTHER_IDENTITY)
    pruned = prune(tmp_path, identity=OTHER_IDENTITY.hex()[:8])
    assert pruned.blocks == 2
    assert pruned.nbytes > 2 * PAYLOAD
    assert [cache.identity for cache in list_caches(tmp_path)] == [IDENTITY.hex()]
    with pytest.raises(SpilloverError, match="nothing to prune"):
        prune(tmp_path)


def test_prune_over_all_caches_takes_the_oldest_blocks(tmp_path: Path) -> None:
    fill(tmp_path, range(8), OTHER_IDENTITY)
    fill(tmp_path, range(8))
    ours = next(cache.nbytes for cache in list_caches(tmp_path) if cache.identity == IDENTITY.hex())
    assert prune(tmp_path, size=ours).blocks == 8
    assert [(cache.identity, cache.blocks) for cache in list_caches(tmp_path)] == [(IDENTITY.hex(), 8)]


def test_prune_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "abcd").mkdir()
    (tmp_path / "abcd" / "precious.txt").write_text("mine")
    assert prune(tmp_path, size=0).blocks == 0
    assert [path.name for path in tmp_path.iterdir()] == ["abcd"], "not even a lock"
    fill(tmp_path, range(3))
    (tmp_path / IDENTITY.hex() / "precious.txt").write_text("mine")
    prune(tmp_path, size=0)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["abcd", "precious.txt", IDENTITY.hex(), "precious.txt", "lock"]
    )


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 14), damaged=st.sets(st.integers(0, 13)), percent=st.integers(0, 120))
@example(count=10, damaged={9}, percent=90)
def test_prune_keeps_whole_what_it_keeps(
    tmp_path_factory: pytest.TempPathFactory, count: int, damaged: set[int], percent: int
) -> None:
    """Whatever has to move and whatever is damaged, the most recently used blocks remain, and load correctly."""
    path = tmp_path_factory.mktemp("cache")
    tier = open_disk(path, slots=20)
    for number in range(count):
        put(tier, some_blocks(number))
    for number in damaged & set(range(count)):
        tier.damage(block_key(number), number * 777)
    close(tier)
    size = bytes_under(path) * percent // 100
    prune(path, size=size)
    assert bytes_under(path) <= size + 16
    tier = open_disk(path, slots=20)
    loaded = get(tier, [block_key(number) for number in range(count)], PAYLOAD)
    assert all(payload in (None, block_bytes(number, PAYLOAD)) for number, payload in enumerate(loaded))
    left = {number for number, payload in enumerate(loaded) if payload is not None}
    first = 0 if percent >= 100 else min(left, default=count)
    assert left == set(range(first, count)) - damaged
    tier.check()
    close(tier)
