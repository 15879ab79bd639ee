"""The disk tier keeps what it reports, within its budget, over restarts, and never returns anything else."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers import segment as segment_module
from spillover.memory.tiers.base import CorruptRecordError
from support import TESTS
from support.disk_calls import PAYLOAD, bytes_under, open_disk, room_for, some_blocks
from support.tier_calls import OTHER_IDENTITY, block_bytes, block_key, close, get, has, no_wake, put, wait


def test_blocks_come_back_exactly(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    blocks = some_blocks(*range(8))
    assert put(tier, blocks) == [True] * 8
    assert has(tier, [*blocks, block_key(99)]) == [True] * 8 + [False]
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    assert get(tier, [block_key(99)], PAYLOAD) == [None]
    stats = tier.stats()
    assert (stats.blocks, stats.stores, stats.loads) == (8, 8, 8)
    assert stats.bytes == stats.bytes_written == stats.bytes_read == 8 * PAYLOAD
    assert stats.seconds_writing > 0
    assert stats.seconds_reading > 0
    assert (stats.load_failures, stats.store_failures, stats.evictions, stats.available) == (0, 0, 0, True)
    tier.check()
    close(tier)


def test_storing_again_writes_nothing(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    blocks = some_blocks(1)
    (item,) = blocks.items()
    first, second = tier.store([(item[0], memoryview(item[1]))] * 2)
    assert wait(tier, [first, second]) == [True, True]
    assert put(tier, blocks) == [True]
    assert tier.stats().stores == 1
    close(tier)


def test_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=4)
    put(tier, some_blocks(0, 1, 2, 3))
    put(tier, some_blocks(4))
    assert has(tier, [block_key(i) for i in range(5)]) == [True, True, True, False, True]
    get(tier, [block_key(1), block_key(2)], PAYLOAD)
    put(tier, some_blocks(5, 6))
    assert has(tier, [block_key(i) for i in range(7)]) == [False, True, True, False, False, True, True]
    assert tier.stats().evictions == 3
    assert tier.evict(1).result() == 1
    assert has(tier, [block_key(2)]) == [False]
    assert tier.evict(10).result() == 3
    assert tier.stats().blocks == 0
    tier.check()
    close(tier)


def test_bytes_under_the_folder_stay_within_the_size(tmp_path: Path) -> None:
    capacity = room_for(9)
    tier = open_disk(tmp_path, slots=9)
    for start in range(0, 60, 5):
        put(tier, some_blocks(*range(start, start + 5)))
        assert bytes_under(tmp_path) <= capacity
    assert tier.stats().blocks == 9
    close(tier)
    assert bytes_under(tmp_path) <= capacity
    assert list(tmp_path.rglob("*.tmp")) == []


def test_batch_larger_than_the_disk_stores_what_fits(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=5)
    results = put(tier, some_blocks(*range(12)))
    assert results.count(True) >= 5
    assert set(results) == {True, False}
    assert tier.stats().store_failures == results.count(False)
    stored = [block_key(i) for i, result in enumerate(results) if result]
    assert has(tier, stored) == [True] * len(stored)
    tier.check()
    close(tier)


def test_restart_finds_everything_and_the_order_of_use(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=6)
    blocks = some_blocks(*range(6))
    for key, payload in blocks.items():
        put(tier, {key: payload})
    get(tier, [block_key(0)], PAYLOAD)  # the oldest, used again
    close(tier)

    tier = open_disk(tmp_path, slots=6)
    assert (tier.stats().blocks, tier.dropped) == (6, 0)
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    close(tier)

    tier = open_disk(tmp_path, slots=6)
    put(tier, some_blocks(10))
    assert has(tier, [block_key(5), block_key(0)]) == [False, True], "the last of the batch of six is the oldest"
    close(tier)


def test_order_of_writing_survives_where_no_order_of_use_was_written(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=4)
    for number in (3, 1, 2, 0):
        put(tier, some_blocks(number))
    close(tier)
    (recency,) = tmp_path.rglob("recency")
    recency.write_bytes(b"torn" + recency.read_bytes()[4:])
    tier = open_disk(tmp_path, slots=4)
    put(tier, some_blocks(7, 8))
    assert has(tier, [block_key(i) for i in range(4)]) == [True, False, True, False]
    close(tier)


def test_smaller_size_after_a_restart_is_kept(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=16)
    for number in range(16):
        put(tier, some_blocks(number))
    close(tier)
    tier = open_disk(tmp_path, slots=6)
    assert bytes_under(tmp_path) <= room_for(6)
    kept = [number for number in range(16) if has(tier, [block_key(number)])[0]]
    assert kept == [12, 13, 14, 15]
    assert get(tier, [block_key(n) for n in kept], PAYLOAD) == [block_bytes(n, PAYLOAD) for n in kept]
    put(tier, some_blocks(20, 21, 22))
    assert bytes_under(tmp_path) <= room_for(6)
    close(tier)


def test_flipped_bit_is_a_miss_and_gone(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    blocks = some_blocks(*range(4))
    put(tier, blocks)
    assert tier.damage(block_key(2), 12345)
    ticket = tier.load([(block_key(2), memoryview(bytearray(PAYLOAD)))])[0]
    assert wait(tier, [ticket]) == [None]
    assert isinstance(ticket.error, CorruptRecordError)
    assert tier.stats().load_failures == 1
    assert tier.stats().available
    assert has(tier, list(blocks)) == [True, True, False, True]
    assert put(tier, {block_key(2): blocks[block_key(2)]}) == [True]
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    tier.check()
    close(tier)


def test_every_byte_of_a_segment_may_be_damaged(tmp_path: Path) -> None:
    """Whatever byte of the file is changed while it is closed, what loads is right."""
    tier = open_disk(tmp_path, slots=4)
    blocks = some_blocks(*range(4))
    put(tier, blocks)
    close(tier)
    (path,) = tmp_path.rglob("*.kv")
    original = path.read_bytes()
    lost = 0
    for offset in [*range(0, 120, 7), *range(4096, 4096 + 4 * 256, 41), *range(8192, len(original), 3333)]:
        changed = bytearray(original)
        changed[offset] ^= 0x10
        path.write_bytes(changed)
        tier = open_disk(tmp_path, slots=4)
        loaded = get(tier, list(blocks), PAYLOAD)
        for got, stored in zip(loaded, blocks.values(), strict=True):
            assert got in (None, stored), f"byte {offset} changed"
        lost += None in loaded
        close(tier)
    assert lost > 20, "the bytes changed were not those of records"


def test_file_cut_short_loses_only_what_was_cut(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=4)
    blocks = some_blocks(*range(4))
    for key, payload in blocks.items():
        put(tier, {key: payload})
    close(tier)
    (path,) = tmp_path.rglob("*.kv")
    os.truncate(path, 4096 + 4096 + 2 * 8192 + 100)
    tier = open_disk(tmp_path, slots=4)
    assert tier.dropped == 2
    assert get(tier, list(blocks), PAYLOAD) == [*list(blocks.values())[:2], None, None]
    put(tier, some_blocks(8, 9))
    assert get(tier, [block_key(8), block_key(9)], PAYLOAD) == list(some_blocks(8, 9).values())
    close(tier)


def test_another_identity_never_hits(tmp_path: Path) -> None:
    blocks = some_blocks(*range(3))
    tier = open_disk(tmp_path, slots=20)
    put(tier, blocks)
    close(tier)
    other = open_disk(tmp_path, slots=20, identity=OTHER_IDENTITY)
    assert has(other, list(blocks)) == [False] * 3
    assert get(other, list(blocks), PAYLOAD) == [None] * 3
    close(other)
    (segment,) = tmp_path.glob("0001*/*.kv")
    (tmp_path / OTHER_IDENTITY.hex() / segment.name).write_bytes(segment.read_bytes())
    other = open_disk(tmp_path, slots=20, identity=OTHER_IDENTITY)
    assert has(other, list(blocks)) == [False] * 3, "a file that strayed into this cache"
    close(other)
    tier = open_disk(tmp_path, slots=20)
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    close(tier)


def test_same_identity_with_another_payload_starts_anew(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=20)
    put(tier, some_blocks(1, 2))
    close(tier)
    tier = open_disk(tmp_path, slots=20, payload_bytes=3000)
    assert has(tier, [block_key(1)]) == [False]
    assert put(tier, {block_key(1): block_bytes("new", 3000)}) == [True]
    close(tier)


def test_other_caches_count_and_the_oldest_goes_first(tmp_path: Path) -> None:
    names = [bytes([i]) * 32 for i in range(1, 4)]
    for age, identity in enumerate(names):
        tier = open_disk(tmp_path, slots=100, identity=identity)
        for number in range(4):
            put(tier, some_blocks(number))
        close(tier)
        for path in (tmp_path / identity.hex()).iterdir():
            os.utime(path, (1e9 + age, 1e9 + age))
    capacity = bytes_under(tmp_path) + room_for(1)
    tier = open_disk(tmp_path, capacity_bytes=capacity)
    for number in range(40):
        assert put(tier, some_blocks(number)) == [True]
        assert bytes_under(tmp_path) <= capacity
        if number == 4:
            assert not (tmp_path / names[0].hex()).exists()
            assert (tmp_path / names[2].hex()).exists()
    assert not any((tmp_path / identity.hex()).exists() for identity in names)
    assert tier.stats().blocks > 8, "their room is ours now"
    tier.check()
    close(tier)


def test_full_folder_of_another_cache_makes_room_at_the_start(tmp_path: Path) -> None:
    other = open_disk(tmp_path, slots=8, identity=OTHER_IDENTITY)
    for number in range(8):
        put(other, some_blocks(number))
    close(other)
    tier = open_disk(tmp_path, slots=8)
    assert put(tier, some_blocks(1)) == [True]
    assert bytes_under(tmp_path) <= room_for(8)
    close(tier)


def test_clear_forgets_for_good(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    put(tier, some_blocks(*range(8)))
    tier.evict(2)  # still on disk, but in no index
    late = tier.store([(key, memoryview(payload)) for key, payload in some_blocks(20, 21, 22).items()])
    tier.clear()
    keys = [block_key(i) for i in [*range(8), 20, 21, 22]]
    assert has(tier, keys) == [False] * 11
    wait(tier, late)
    assert has(tier, keys) == [False] * 11
    tier.check()
    deadline = time.monotonic() + 10
    while put(tier, some_blocks(30)) != [True]:  # slots are being erased
        assert time.monotonic() < deadline
    close(tier)
    tier = open_disk(tmp_path)
    assert has(tier, [*keys, block_key(30)]) == [False] * 11 + [True]
    close(tier)


def test_one_process_a_folder(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    with pytest.raises(SpilloverError, match=f"in use by process {os.getpid()}"):
        open_disk(tmp_path, identity=OTHER_IDENTITY)
    close(tier)
    close(open_disk(tmp_path))


def test_another_process_is_refused_until_this_one_ends(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.disk_calls import open_disk
from spillover.errors import SpilloverError
try:
    open_disk(Path({str(tmp_path)!r}))
    print("opened", flush=True)
    sys.stdin.read()
except SpilloverError as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    tier = open_disk(tmp_path)
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert f"in use by process {os.getpid()}; stop that one" in refused.stdout, refused.stderr
    close(tier)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "opened\n"
        with pytest.raises(SpilloverError, match=f"in use by process {holder.pid}"):
            open_disk(tmp_path)
        holder.kill()
        holder.wait(10)
        close(open_disk(tmp_path))


def test_bad_arguments_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpilloverError, match=r"cannot hold one block; give it at least .*bytes"):
        open_disk(tmp_path / "new", capacity_bytes=room_for(1) - 1)
    assert not (tmp_path / "new").exists()
    close(open_disk(tmp_path / "new", capacity_bytes=room_for(1)))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SpilloverError, match="is a file, or inside a file"):
            open_disk(path)


def test_smallest_disk_holds_one_block(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=1)
    for number in range(5):
        assert put(tier, some_blocks(number)) == [True]
        assert get(tier, [block_key(number)], PAYLOAD) == [block_bytes(number, PAYLOAD)]
        assert tier.stats().blocks == 1
    close(tier)
    assert bytes_under(tmp_path) <= room_for(1)


def test_close_writes_what_was_queued(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    blocks = some_blocks(*range(10))
    tier.store([(key, memoryview(payload)) for key, payload in blocks.items()])
    close(tier)
    close(tier)
    assert has(tier, list(blocks)) == [False] * 10, "closed"
    assert put(tier, some_blocks(50)) == [False]
    tier = open_disk(tmp_path)
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    close(tier)


def test_evicted_slot_is_not_reused_while_a_load_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(tmp_path, slots=1)
    put(tier, some_blocks(1))
    reading, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def slow(file, buffers, offset):
        reading.set()
        assert go_on.wait(30)
        return real(file, buffers, offset)

    monkeypatch.setattr(segment_module.os, "preadv", slow)
    buffer = memoryview(bytearray(PAYLOAD))
    (load,) = tier.load([(block_key(1), buffer)])
    assert reading.wait(10)
    assert tier.evict(1).result() == 0
    assert put(tier, some_blocks(2)) == [False], "the only slot is being read"
    tier.clear()
    assert put(tier, some_blocks(2)) == [False]
    go_on.set()
    assert wait(tier, [load]) == [True]
    assert buffer == block_bytes(1, PAYLOAD)
    monkeypatch.undo()
    deadline = time.monotonic() + 10
    while put(tier, some_blocks(2)) != [True]:
        assert time.monotonic() < deadline
    tier.check()
    close(tier)


def test_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(tmp_path, load_seconds=0.1, store_seconds=0.1, threads=1)
    put(tier, some_blocks(1, 2))
    go_on = threading.Event()
    real = os.preadv

    def hang(file, buffers, offset):
        assert go_on.wait(60)
        return real(file, buffers, offset)

    monkeypatch.setattr(segment_module.os, "preadv", hang)
    buffers = [memoryview(bytearray(PAYLOAD)) for _ in range(3)]
    running, queued = tier.load([(block_key(1), buffers[0]), (block_key(2), buffers[1])])
    deadline = time.monotonic() + 10
    while not (running.expired(time.monotonic()) and queued.done()):
        assert time.monotonic() < deadline
        tier.poll()
        time.sleep(0.01)
    assert not running.done()
    assert not tier.stats().available
    assert has(tier, [block_key(2)]) == [False]
    assert get(tier, [block_key(2)], PAYLOAD) == [None]
    start = time.monotonic()
    tier.close(time.monotonic() + 0.2)
    assert time.monotonic() - start < 5
    with pytest.raises(SpilloverError, match="in use"):
        open_disk(tmp_path)
    go_on.set()
    assert wait(None, [running]) == [True]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ETIMEDOUT])
def test_failing_writes_are_declined_and_recover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    tier = open_disk(tmp_path, rest_seconds=0.1)
    blocks = some_blocks(*range(4))
    put(tier, blocks)
    real = os.pwritev

    def fail(file, buffers, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segment_module.os, "pwritev", fail)
    ticket = tier.store([(block_key(9), memoryview(block_bytes(9, PAYLOAD)))])[0]
    assert wait(tier, [ticket]) == [None]
    assert isinstance(ticket.error, OSError)
    assert tier.stats().store_failures == 1
    assert not tier.stats().available
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    monkeypatch.setattr(segment_module.os, "pwritev", real)
    assert put(tier, some_blocks(10)) == [True]
    time.sleep(0.15)
    assert put(tier, some_blocks(*range(20, 30))) == [True] * 10, "all ten slots are in use again"
    assert tier.stats().available
    tier.check()
    close(tier)


def test_failing_read_drops_that_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(tmp_path, rest_seconds=0.05)
    blocks = some_blocks(1, 2)
    put(tier, blocks)

    def fail(file, buffers, offset):
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(segment_module.os, "preadv", fail)
        assert get(tier, [block_key(1)], PAYLOAD) == [None]
    assert not tier.stats().available
    assert tier.stats().load_failures == 1
    assert has(tier, list(blocks)) == [False, True]
    assert get(tier, [block_key(2)], PAYLOAD) == [blocks[block_key(2)]]
    assert tier.stats().available
    assert put(tier, {block_key(1): blocks[block_key(1)]}) == [True]
    tier.check()
    close(tier)


def test_half_written_block_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle of a payload that replaces another block leaves no block to load."""
    tier = open_disk(tmp_path, slots=2, rest_seconds=0.0)
    put(tier, some_blocks(1, 2))
    real = os.pwritev
    calls = 0

    def half(file, buffers, offset):
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(file, buffers, offset)  # the header, zeroed
        if calls == 2:
            return real(file, [buffers[0][:1000]], offset)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(segment_module.os, "pwritev", half)
    assert put(tier, some_blocks(3)) == [None]
    monkeypatch.undo()
    assert has(tier, [block_key(1), block_key(2), block_key(3)]) == [True, False, False]
    close(tier)
    tier = open_disk(tmp_path, slots=2)
    assert get(tier, [block_key(i) for i in (1, 2, 3)], PAYLOAD) == [block_bytes(1, PAYLOAD), None, None]
    close(tier)


def test_wake_is_called_when_a_ticket_ends(tmp_path: Path) -> None:
    woken = threading.Event()
    tier = open_disk(tmp_path, wake=woken.set)
    tier.store([(block_key(1), memoryview(block_bytes(1, PAYLOAD)))])
    assert woken.wait(10)
    close(tier)


def test_many_blocks_with_many_threads(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=64, threads=4, wake=no_wake)
    blocks = some_blocks(*range(64))
    assert put(tier, blocks) == [True] * 64
    for _ in range(3):
        assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    tier.check()
    close(tier)
