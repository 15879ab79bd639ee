"""Weights in a pool: the index under random use, and what an engine receives, keeps and frees."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from spillover.kernels.huge_pages import address_of
from spillover.memory.shared_pool import weights
from spillover.memory.shared_pool.index import PoolIndex
from spillover.memory.shared_pool.runs import PoolRuns
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.transfer.host_pool import HostPool
from support.pool_process import PoolProcess

SLAB = 4 * 4096


@pytest.mark.parametrize("seed", range(30))
def test_random_use_never_exceeds_the_budget_nor_takes_from_a_user(seed: int) -> None:
    chance = random.Random(seed)
    files: set[int] = set()

    def make(nbytes: int) -> int:
        if chance.random() < 0.1:
            raise OSError("no memory")
        fd = os.memfd_create("run")
        files.add(fd)
        return fd

    index = PoolIndex(8 * SLAB, SLAB)
    runs = PoolRuns(index, make)
    index.reclaim = lambda: runs.free_slabs(1)
    client = index.join(b"model", SLAB, {})
    users: list[object] = [object() for _ in range(4)]
    held: dict[object, set[tuple[bytes, int]]] = {user: set() for user in users}
    for turn in range(120):
        user, name = chance.choice(users), (bytes([chance.randrange(5)]), chance.randrange(1, 4) * SLAB - 1)
        writers = {run.name: run for run in runs if not run.written}
        match chance.choice(["take", "take", "written", "leave", "block", "evict"]):
            case "take":
                idle = sum(run.slabs for run in runs if not run.users)
                run, room = runs.acquire(user, name), index.unused + idle
                if run is None:
                    continue  # no room, or no memory
                if name in writers and user not in writers[name].users:
                    assert user not in run.users, "what another writes was handed out"
                else:
                    assert user in run.users
                    assert room >= 0
                    held[user].add(name)
            case "written":
                assert runs.written(user, name) == (name in writers and user in writers[name].users)
            case "leave":
                runs.release(user)
                held[user].clear()
            case "block":
                before = {run.name for run in runs if run.users}
                index.publish(client, [place for place in index.take(client, [bytes([turn])]) if place >= 0], [1])
                assert before <= {run.name for run in runs}, "a run that somebody has went for a block"
            case "evict":
                index.evict(1)
        for each, names in held.items():
            there = {run.name for run in runs if each in run.users}
            assert there == names, "a run was taken from its user"
        index.check()
        assert index.capacity + sum(run.slabs for run in runs) * SLAB == 8 * SLAB
        assert runs.nbytes <= 8 * SLAB - index.prepared_bytes
    runs.close()
    for fd in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def contents(*numbers: int, nbytes: int = 50_000) -> list[memoryview]:
    return [memoryview(bytearray(random.Random(number).randbytes(nbytes))) for number in numbers]


@pytest.fixture
def pool() -> PoolProcess:  # type: ignore[misc]
    with PoolProcess(16 << 20) as process:
        yield process


def test_engines_have_the_same_memory_and_a_third_finds_it(pool: PoolProcess) -> None:
    one, two = (SharedWeights(pool.path, HostPool()) for _ in range(2))
    wanted = contents(*range(6))
    for content in wanted:
        first, second = one.keep(content), two.keep(content)
        assert first == second == content
        assert first is not None
        assert second is not None
        first[17] ^= 1
        assert second[17] == first[17], "it is not the same memory"
        first[17] ^= 1
    assert (one.nbytes, one.found_bytes, two.nbytes, two.found_bytes) == (300_000, 0, 300_000, 300_000)
    assert (pool.report().weights, pool.report().weights_used) == (300_000, 300_000)
    for engine in (one, two):
        engine.close()
    while pool.report().weights_used:
        pass
    third = SharedWeights(pool.path, HostPool())
    assert third.keep(wanted[3]) == wanted[3]
    assert third.found_bytes == 50_000
    assert pool.report().weights == 300_000
    third.close()


def test_a_pool_without_room_or_without_an_owner_is_told_once(pool: PoolProcess, caplog: pytest.LogCaptureFixture
                                                             ) -> None:
    engine = SharedWeights(pool.path, HostPool())
    (small,) = contents(1)
    kept = engine.keep(small)
    assert engine.keep(memoryview(bytearray(17 << 20))) is None
    assert engine.keep(small) is None, "it goes on asking"
    assert "no room for 17" in caplog.text
    assert len(caplog.records) == 1
    pool.kill()
    assert kept == small, "what is mapped stays"
    caplog.clear()
    other = SharedWeights(pool.path, HostPool())
    assert other.keep(small) is None
    assert "kept in this engine's own memory" in caplog.text


def test_damage_is_seen_and_a_writer_that_dies_leaves_nothing(pool: PoolProcess, monkeypatch: pytest.MonkeyPatch,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    one, two = (SharedWeights(pool.path, HostPool()) for _ in range(2))
    (content,) = contents(1)
    memory = one.keep(content)
    assert memory is not None
    memory[49_999] ^= 4
    assert two.keep(content) is None
    assert "differ from the checkpoint's" in caplog.text
    program = """
import sys, time
from pathlib import Path
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.client import Connection
from spillover.memory.shared_pool.weights import xxhash
connection = Connection(Path(sys.argv[1]), 10)
content = sys.stdin.buffer.read()
print(connection.keep(wire.Keep(wire.VERSION, xxhash.xxh3_128_digest(content), len(content), "x"),
      time.monotonic() + 10)[0].state, flush=True)
time.sleep(60)
"""
    (another,) = contents(2)
    writer = subprocess.Popen([sys.executable, "-c", program, str(Path(pool.path))], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        writer.stdin.write(another)
        writer.stdin.close()
        assert writer.stdout.readline() == b"new\n"
        waiting = SharedWeights(pool.path, HostPool())
        monkeypatch.setattr(weights, "BUSY_SECONDS", 0.05)
        assert waiting.keep(another) is None, "it got what another had not written"
    finally:
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
    after = SharedWeights(pool.path, HostPool())
    monkeypatch.setattr(weights, "BUSY_SECONDS", 30.0)
    assert after.keep(another) == another
    assert after.found_bytes == 0


def test_what_cannot_be_pinned_is_not_taken(pool: PoolProcess, caplog: pytest.LogCaptureFixture) -> None:
    class Refuses:
        def populate(self, address: int, nbytes: int) -> None: ...

        def register(self, address: int, nbytes: int) -> bool:
            return False

        def unregister(self, address: int) -> None:
            raise AssertionError("it was never pinned")

    (content,) = contents(1)
    engine = SharedWeights(pool.path, HostPool(Refuses()))
    assert engine.keep(content) is None
    assert "could not be pinned" in caplog.text
    assert address_of(content)
