"""The pool's tier and the pool's process: blocks can be loaded again, are shared, and are never mixed up."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import address_of
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connections, PoolUnavailableError, ask_owner
from spillover.memory.shared_pool.owner import PoolOwner
from spillover.memory.shared_pool.tier import SharedPoolTier
from spillover.memory.tiers.base import CorruptRecordError, MappedTier
from support.pool_process import PoolProcess, mapped_pools, open_files
from support.tier_calls import (
    DESCRIPTION,
    IDENTITY,
    OTHER_IDENTITY,
    block_bytes,
    block_key,
    close,
    get,
    has,
    no_wake,
    put,
    wait,
)

PAYLOAD = 10_000
STRIDE = 12_288
PATIENT = 20.0  # seconds: these tests check contents, not timing


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    with PoolProcess(16 * 4 * STRIDE) as process:  # 64 blocks
        yield process


def open_tier(pool: PoolProcess, **changes: Any) -> SharedPoolTier:
    settings: dict[str, Any] = {"payload_bytes": PAYLOAD, "identity": IDENTITY, "description": DESCRIPTION,
                                "wake": no_wake, "timeout": PATIENT, "lookup_timeout": PATIENT, "retry_seconds": 0.1}
    return SharedPoolTier(pool.path, **settings | changes)


@pytest.fixture
def tier(pool: PoolProcess) -> Iterator[SharedPoolTier]:
    opened = open_tier(pool)
    yield opened
    close(opened)


def some_blocks(*numbers: int, nbytes: int = PAYLOAD) -> dict[bytes, bytes]:
    return {block_key(number): block_bytes(number, nbytes) for number in numbers}


def until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_blocks_come_back_exactly(pool: PoolProcess, tier: SharedPoolTier) -> None:
    blocks = some_blocks(*range(30))
    assert put(tier, blocks) == [True] * 30
    assert has(tier, [*blocks, block_key(99)]) == [True] * 30 + [False]
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    assert get(tier, [block_key(99), block_key(3)], PAYLOAD) == [None, blocks[block_key(3)]]
    stats = tier.stats()
    assert (stats.stores, stats.loads, stats.bytes_read, stats.bytes_written) == (30, 31, 31 * PAYLOAD, 30 * PAYLOAD)
    assert (stats.load_failures, stats.store_failures, stats.available) == (0, 0, True)
    report = pool.report()
    assert (report.engines, report.used, [model.blocks for model in report.models]) == (1, 30 * STRIDE, [30])
    assert report.models[0].description == DESCRIPTION


def test_engines_share_and_identities_do_not(pool: PoolProcess, tier: SharedPoolTier) -> None:
    second, stranger = open_tier(pool), open_tier(pool, identity=OTHER_IDENTITY)
    blocks = some_blocks(1, 2)
    put(tier, blocks)
    assert get(second, list(blocks), PAYLOAD) == list(blocks.values())
    assert put(second, blocks) == [True, True]
    assert second.stats().bytes_written == 0, "a block that is there is written again"
    assert has(stranger, list(blocks)) == [False, False]
    assert get(stranger, list(blocks), PAYLOAD) == [None, None]
    assert pool.report().engines == 3
    for other in (second, stranger):
        close(other)
    until(lambda: pool.report().engines == 1)


def test_what_an_engine_stored_outlives_it(pool: PoolProcess) -> None:
    first = open_tier(pool)
    put(first, some_blocks(1, 2, 3))
    close(first)
    second = open_tier(pool)
    assert get(second, list(some_blocks(1, 2, 3)), PAYLOAD) == list(some_blocks(1, 2, 3).values())
    close(second)


def test_two_models_of_different_sizes_share_one_budget(pool: PoolProcess, tier: SharedPoolTier) -> None:
    other = open_tier(pool, identity=OTHER_IDENTITY, payload_bytes=700)
    rng = random.Random(4)
    for turn in range(60):
        number = rng.randrange(1000)
        one, nbytes = (tier, PAYLOAD) if turn % 2 else (other, 700)
        blocks = some_blocks(*range(number, number + 12), nbytes=nbytes)
        assert all(put(one, blocks))
        for found, expected in zip(get(one, list(blocks), nbytes), blocks.values(), strict=True):
            assert found in (None, expected)
    report = pool.report()
    assert report.used <= report.prepared <= report.capacity <= pool.capacity
    assert all(model.blocks for model in report.models)
    close(other)


def test_a_full_pool_forgets_the_oldest(pool: PoolProcess, tier: SharedPoolTier) -> None:
    for first in range(0, 200, 20):
        assert put(tier, some_blocks(*range(first, first + 20))) == [True] * 20
    assert has(tier, list(some_blocks(*range(180, 200)))) == [True] * 20
    assert has(tier, list(some_blocks(*range(100)))) == [False] * 100
    assert tier.stats().store_failures == 0


def test_damaged_block_is_a_miss(tier: SharedPoolTier) -> None:
    put(tier, some_blocks(1, 2))
    assert tier.damage(block_key(1), 12345)
    (ticket,) = tier.load([(block_key(1), memoryview(bytearray(PAYLOAD)))])
    assert wait(tier, [ticket]) == [None]
    assert isinstance(ticket.error, CorruptRecordError)
    assert (tier.stats().load_failures, tier.stats().available) == (1, True)
    assert has(tier, [block_key(1), block_key(2)]) == [False, True], "removed, so that it can be stored again"
    assert put(tier, some_blocks(1)) == [True]
    assert get(tier, [block_key(1)], PAYLOAD) == [block_bytes(1, PAYLOAD)]
    assert not tier.damage(block_key(77), 1)


class Device:
    """Blocks of a device, and a link that refuses copies across the end of a slab."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [bytearray(PAYLOAD) for _ in range(num_blocks)]
        self.copies = 0
        self.fails = False

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        self._check(slots)
        for block, slot in zip(blocks, slots, strict=True):
            slot[:] = self.blocks[block]

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._check(slots)
        for block, slot in zip(blocks, slots, strict=True):
            self.blocks[block][:] = slot

    def _check(self, slots: Sequence[memoryview]) -> None:
        if self.fails:
            raise RuntimeError("injected")
        self.copies += len(slots)
        addresses = [address_of(slot) for slot in slots]
        assert max(addresses) - min(addresses) < 4 * STRIDE, "a copy over two slabs"


def test_blocks_go_between_the_pool_and_a_device_directly(pool: PoolProcess, tier: SharedPoolTier) -> None:
    """Whether copied directly or through the host, and in any order, a block loads as it was stored."""
    assert isinstance(tier, MappedTier)
    rng, device = random.Random(5), Device(16)
    second = open_tier(pool)
    for _ in range(40):
        numbers = rng.sample(range(100), 12)
        blocks = some_blocks(*numbers)
        writer, reader = rng.choice([(tier, second), (second, tier)])
        if rng.random() < 0.5:
            assert put(writer, blocks) == [True] * 12
        else:
            for at, payload in enumerate(blocks.values()):
                device.blocks[at][:] = payload
            assert wait(writer, writer.store_from([(key, at) for at, key in enumerate(blocks)], device.copy_out)) == [
                True] * 12
        if rng.random() < 0.5:
            assert get(reader, list(blocks), PAYLOAD) == list(blocks.values())
        else:
            to = rng.sample(range(16), 12)
            asked = [*zip(blocks, to, strict=True), (block_key(1000), 0)]
            device.blocks[0][:] = b"x" * PAYLOAD
            kept = 0 if 0 not in to else None
            assert wait(reader, reader.load_to(asked, device.copy_in)) == [True] * 12 + [False]
            assert [bytes(device.blocks[at]) for at in to] == list(blocks.values())
            assert kept is None or device.blocks[kept] == b"x" * PAYLOAD
    assert device.copies > 100
    assert tier.stats().load_failures == tier.stats().store_failures == 0
    close(second)


def test_a_copy_that_fails_costs_its_blocks_and_not_the_pool(pool: PoolProcess, tier: SharedPoolTier) -> None:
    device = Device(4)
    put(tier, some_blocks(1))
    device.fails = True
    assert wait(tier, tier.load_to([(block_key(1), 0)], device.copy_in)) == [None]
    assert wait(tier, tier.store_from([(block_key(2), 1)], device.copy_out)) == [None]
    assert tier.stats().available
    assert has(tier, [block_key(1), block_key(2)]) == [True, False]
    device.fails = False
    assert wait(tier, tier.load_to([(block_key(1), 0)], device.copy_in)) == [True]
    assert tier.damage(block_key(1), 999)
    (ticket,) = tier.load_to([(block_key(1), 0)], device.copy_in)
    assert wait(tier, [ticket]) == [None]
    assert isinstance(ticket.error, CorruptRecordError)
    assert wait(tier, tier.store_from([(block_key(2), 1)], device.copy_out)) == [True]
    assert pool.report().used == STRIDE, "the slot of the copy that failed is not free"


def test_clear_and_evict(pool: PoolProcess, tier: SharedPoolTier) -> None:
    other = open_tier(pool, identity=OTHER_IDENTITY)
    for one in (tier, other):
        put(one, some_blocks(*range(8)))
    assert wait(tier, [tier.evict(3)]) == [3]
    assert sum(has(tier, list(some_blocks(*range(8))))) == 5
    tier.clear()
    until(lambda: tier.stats().available)
    assert not any(has(tier, list(some_blocks(*range(8)))))
    assert all(has(other, list(some_blocks(*range(8)))))
    close(other)


def test_a_killed_owner_costs_its_blocks_and_nothing_else(pool: PoolProcess, tier: SharedPoolTier) -> None:
    put(tier, some_blocks(1, 2))
    files = open_files()
    for _ in range(3):
        pool.kill()
        started = time.monotonic()
        assert has(tier, [block_key(1)]) == [False]
        assert get(tier, [block_key(1)], PAYLOAD) == [None]
        assert put(tier, some_blocks(1)) == [False]
        assert time.monotonic() - started < 5
        assert not tier.stats().available
        until(lambda: mapped_pools() == 0)
        pool.start()
        until(lambda: tier.stats().available)
        assert has(tier, [block_key(1)]) == [False], "a block of the owner before"
        assert put(tier, some_blocks(1, 2)) == [True, True]
        assert get(tier, [block_key(1), block_key(2)], PAYLOAD) == list(some_blocks(1, 2).values())
    assert mapped_pools() == 1
    assert open_files() <= files + 2, "descriptors are left open"


def test_an_idle_engine_gives_a_dead_owners_memory_back(pool: PoolProcess) -> None:
    tier = open_tier(pool, probe_seconds=0.05)
    put(tier, some_blocks(1))
    assert mapped_pools() == 1
    pool.kill()
    until(lambda: mapped_pools() == 0)  # although the tier is not called
    close(tier)


def test_a_stopped_owner_is_waited_for_once(pool: PoolProcess) -> None:
    tier = open_tier(pool, timeout=0.5, lookup_timeout=0.2, retry_seconds=0.3)
    put(tier, some_blocks(1))
    pool.freeze()
    started = time.monotonic()
    assert has(tier, [block_key(1)]) == [False]
    for _ in range(200):
        assert has(tier, [block_key(1)]) == [False]
        assert get(tier, [block_key(1)], PAYLOAD) == [None]
    assert time.monotonic() - started < 10, "each call waits"
    assert not tier.stats().available
    pool.thaw()
    until(lambda: tier.stats().available)
    assert get(tier, [block_key(1)], PAYLOAD) == [block_bytes(1, PAYLOAD)]
    until(lambda: pool.report().engines == 1)
    close(tier)


def test_what_a_killed_engine_held_is_free_again(pool: PoolProcess) -> None:
    """The memory held by an engine that dies while it writes and reads becomes available to others."""
    program = """
import os, sys, time
from pathlib import Path
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connections
connections = Connections(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]), {})
deadline = time.monotonic() + 20
with connections.use(deadline) as (connection, _):
    first = [bytes([1, n]) for n in range(30)]
    places = connection.ask(wire.Take(first), wire.Places, deadline).places
    connection.ask(wire.Publish(places, places), wire.Found, deadline)
    connection.ask(wire.Pin(first), wire.Pinned, deadline)
    places = connection.ask(wire.Take([bytes([2, n]) for n in range(100)]), wire.Places, deadline).places
    print(sum(place >= 0 for place in places), flush=True)
    time.sleep(60)
"""
    engine = subprocess.Popen([sys.executable, "-c", program, str(pool.path), IDENTITY.hex(), str(PAYLOAD)],
                              stdout=subprocess.PIPE)
    assert engine.stdout is not None
    try:
        assert int(engine.stdout.readline()) == 34
        tier = open_tier(pool)
        assert put(tier, some_blocks(7)) == [False], "every slot is being read or written"
    finally:
        engine.kill()
        engine.wait(10)
        engine.stdout.close()
    until(lambda: pool.report().engines == 1)
    for first in range(0, 60, 10):
        assert put(tier, some_blocks(*range(first, first + 10))) == [True] * 10
    assert all(has(tier, list(some_blocks(*range(60)))))
    close(tier)


def test_a_second_owner_is_refused_and_a_stale_socket_replaced(pool: PoolProcess) -> None:
    with pytest.raises(SpilloverError, match=rf"served at {pool.path} already, by process \d+"):
        PoolOwner(1 << 20, pool.path)
    assert pool.report().engines == 0, "the first goes on"
    pool.kill()
    assert pool.path.exists()
    pool.start()
    pool.kill(signal.SIGTERM)
    assert not pool.path.exists()


def test_others_are_kept_out(pool: PoolProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.path.parent.stat().st_mode & 0o777 == 0o700
    assert pool.path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SpilloverError, match="others can reach it"):
        PoolOwner(1 << 20, tmp_path / "open" / "sock")
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "sock").write_text("a file of somebody")
    with pytest.raises(SpilloverError, match="no socket"):
        PoolOwner(1 << 20, tmp_path / "closed" / "sock")
    if os.getuid() == 0:  # a client of another user is rejected, even if it can reach the socket
        pool.folder.chmod(0o755)
        pool.path.parent.chmod(0o755)
        pool.path.chmod(0o666)
        program = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
        stranger = subprocess.run(["/usr/bin/env", "python3", "-c", program, str(pool.path)], user=65534, check=True,
                                  capture_output=True, timeout=30)
        assert stranger.stdout.strip() == b"b''"
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # a pool process of another user is not trusted either
    with pytest.raises(PoolUnavailableError, match="another user"):
        ask_owner(pool.path, wire.Ask(), wire.Report)


def test_nonsense_ends_only_its_own_connection(pool: PoolProcess, tier: SharedPoolTier) -> None:
    put(tier, some_blocks(1))
    for nonsense in (b"\xff" * 64, wire.LENGTH.pack(3) + b"abc", wire.encode(wire.Find([b"x"])),
                     wire.LENGTH.pack(1 << 31), wire.encode(wire.Count(3))):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect(str(pool.path))
            stranger.sendall(nonsense)
            assert stranger.recv(1) == b"", "it was answered"
    assert get(tier, [block_key(1)], PAYLOAD) == [block_bytes(1, PAYLOAD)]


def test_refusals_are_sentences(pool: PoolProcess) -> None:
    deadline = time.monotonic() + 10
    with pytest.raises(PoolUnavailableError, match="cannot hold KV blocks"), \
            Connections(pool.path, b"big", pool.capacity, {}).use(deadline):
        pass
    with pytest.raises(PoolUnavailableError, match="no process serves it"):
        ask_owner(pool.path.with_name("none"), wire.Ask(), wire.Report)
    with pytest.raises(PoolUnavailableError, match="no models"):
        ask_owner(pool.path, wire.Evict(1, "abcd"), wire.Count)


def test_a_missing_owner_may_come_later(pool: PoolProcess, caplog: pytest.LogCaptureFixture) -> None:
    pool.kill()
    tier = open_tier(pool)
    assert put(tier, some_blocks(1)) == [False]
    assert sum("no process serves it" in record.message or "closed" in record.message for record in caplog.records) == 1
    pool.start()
    until(lambda: tier.stats().available)
    assert put(tier, some_blocks(1)) == [True]
    close(tier)
