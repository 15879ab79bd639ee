"""Whatever a tier evicts, loses, expires or forgets: recomputed blocks are stored again, and hits recur.

Random sequences of faults over prompts that do not fit on the device. After each fault one round of the prompts may
recompute what was lost; the next round finds as much as the last one before the fault. Tokens and KV are checked by the
simulated runner at every read, the pools at every step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from spillover.memory.policies.admission import SecondUse
from spillover.memory.spill import spiller, store
from spillover.memory.tiers.base import Tier
from spillover.memory.tiers.disk import DiskTier
from spillover.memory.tiers.recovery import FIXED_BYTES, segment_cost
from spillover.memory.tiers.remote import RemoteTier
from support.faulty_tier import FaultRates, FaultyTier
from support.simulated_tiers import DictTier, MappedDictTier
from support.tiered_world import SIZE, World, prompt
from support.valkey import Valkey

PROMPTS = 6
BLOCKS = 10  # per prompt
NBYTES = SIZE * 6  # per block
IDENTITY = bytes(32)


class Breakable(Protocol):
    """A tier, and operations that break and repair it."""

    def make(self, wake: Callable[[], None]) -> Tier: ...

    def forget_all(self) -> None: ...

    def lose_some(self, rng: random.Random) -> None: ...

    def down(self) -> None: ...

    def up(self) -> None: ...


class Fake:
    def __init__(self, name: str, capacity: int = 1 << 30) -> None:
        self._name, self._capacity = name, capacity

    def make(self, wake: Callable[[], None]) -> Tier:
        if self._name == "pool":
            self.tier: DictTier = MappedDictTier(wake, NBYTES, capacity=self._capacity, lookup_seconds=30)
            return self.tier
        asks = self._name == "remote"
        self.tier = DictTier(wake, self._name, self._capacity, lookup_delay=0.0 if asks else None, lookup_seconds=30)
        return self.tier

    def forget_all(self) -> None:
        self.tier.blocks.clear()

    def lose_some(self, rng: random.Random) -> None:
        for key in rng.sample(sorted(self.tier.blocks), min(len(self.tier.blocks), rng.randrange(1, 9))):
            del self.tier.blocks[key]

    def down(self) -> None:
        self.tier.down = True

    def up(self) -> None:
        self.tier.down = False


class RealDisk:
    def __init__(self, folder: Path, slots: int = 200) -> None:
        self._folder, self._slots = folder, slots

    def make(self, wake: Callable[[], None]) -> Tier:
        capacity = FIXED_BYTES + -(-self._slots // 8) * segment_cost(8, NBYTES)
        self._disk = DiskTier(self._folder, capacity, NBYTES, IDENTITY, {}, wake, segment_bytes=8 * 4096,
                              rest_seconds=0.0)
        self.tier = FaultyTier(self._disk, 0, FaultRates(), wake)
        return self.tier

    def forget_all(self) -> None:
        self._disk.evict(1 << 30)

    def lose_some(self, rng: random.Random) -> None:
        """Lose blocks by eviction, or by flipped bits."""
        if rng.random() < 0.5:
            self._disk.evict(rng.randrange(1, 20))
        else:
            for key in list(self._disk._table._live)[:: rng.randrange(2, 9)]:
                self._disk.damage(key, rng.randrange(NBYTES * 8))

    def down(self) -> None:
        self.tier._rates = FaultRates(fail=1.0)

    def up(self) -> None:
        self.tier._rates = FaultRates()


class RealRemote:
    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey

    def make(self, wake: Callable[[], None]) -> Tier:
        self.tier = RemoteTier(self._valkey.url, NBYTES, IDENTITY, wake, timeout=30, lookup_timeout=30,
                               retry_seconds=0.01)
        return self.tier

    def forget_all(self) -> None:
        self._valkey.client().flushall()

    def lose_some(self, rng: random.Random) -> None:
        client = self._valkey.client()
        names = client.keys("spillover:*")
        lost = rng.sample(names, min(len(names), rng.randrange(1, 9)))
        if lost and rng.random() < 0.5:
            client.unlink(*lost)
        for name in lost:
            client.pexpire(name, 1)
        time.sleep(0.002)

    def down(self) -> None:
        self._valkey.kill()

    def up(self) -> None:
        self._valkey.start()
        deadline = time.monotonic() + 30
        while not self.tier.stats().available:
            assert time.monotonic() < deadline, "the tier does not see that its server is back"
            time.sleep(0.002)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen timeouts, so that no block is lost because a copy is slow on a busy machine."""
    monkeypatch.setattr(spiller, "LOSSY_AFTER_SECONDS", 30.0)
    monkeypatch.setattr(store, "LOSSY_LOAD_SECONDS", 14.0)


def settle(world: World) -> None:
    deadline = time.monotonic() + 20
    while world.connector.busy or world.kv.num_in_flight:
        world.connector.poll()
        world.engine.wait(0.001)
        world.check()
        assert time.monotonic() < deadline, "copies do not end"
    stats = world.kv.stats
    assert stats.free + stats.evictable + stats.protected + stats.in_flight == stats.total


def ask_all(world: World, rng: random.Random, prompts: int = PROMPTS) -> int:
    """Send every prompt once; return the number of tokens that were not computed."""
    cached = 0
    for seed in rng.sample(range(prompts), prompts):
        request = world.ask(prompt(seed, BLOCKS * SIZE + 1), max_tokens=1)
        settle(world)
        assert request.sources is not None
        cached += request.sources.total - request.sources.computed
    return cached


def heals(world: World, broken: list[Breakable], rng: random.Random, faults: int, prompts: int = PROMPTS) -> None:
    for _ in range(2):
        ask_all(world, rng, prompts)
    before = ask_all(world, rng, prompts)
    assert before == prompts * BLOCKS * SIZE, "the tiers are large enough for everything"
    for _ in range(faults):
        tier, fault = rng.choice(broken), rng.choice(["forget_all", "lose_some", "down", "all at once"])
        if fault == "forget_all":
            tier.forget_all()
        elif fault == "lose_some":
            tier.lose_some(rng)
        elif fault == "down":
            tier.down()
            ask_all(world, rng, prompts)
            tier.up()
        else:
            for each in broken:
                each.forget_all()
        ask_all(world, rng, prompts)
        assert ask_all(world, rng, prompts) == before, f"hits do not come back after {fault} of {tier}"
    settle(world)
    world.close()


@pytest.mark.parametrize("eager", [False, True], ids=["evict", "eager"])
@pytest.mark.parametrize("host", [0, 16])
@pytest.mark.parametrize("below", ["disk", "remote", "disk and remote", "small disk and remote", "pool",
                                   "pool and small disk"])
def test_hits_come_back_after_any_fault(below: str, host: int, eager: bool) -> None:
    broken = [Fake(part.split()[-1], 25 if "small" in part else 1 << 30) for part in below.split(" and ")]
    world = World(host=host, tiers=[tier.make for tier in broken], eager=eager, tokens=64)
    heals(world, list(broken), random.Random(f"{below}{host}{eager}"), faults=6)


@pytest.fixture
def real(request: pytest.FixtureRequest, tmp_path: Path) -> list[Breakable]:
    parts: list[Breakable] = []
    for part in request.param.split(" and "):
        if part == "remote":
            parts.append(RealRemote(request.getfixturevalue("valkey")))
        else:
            parts.append(RealDisk(tmp_path / "kv", 25 if "small" in part else 200))
    return parts


@pytest.mark.parametrize("host", [0, 16])
@pytest.mark.parametrize("real", ["disk", "remote", "small disk and remote"], indirect=True)
def test_hits_come_back_after_any_fault_of_real_tiers(real: list[Breakable], host: int) -> None:
    world = World(host=host, tiers=[tier.make for tier in real], tokens=64)
    heals(world, real, random.Random(host), faults=6)


def test_a_full_disk_keeps_storing() -> None:
    """If half of the prompts fit, the most recent ones are found, round after round."""
    tier = Fake("disk", capacity=30)
    world = World(tiers=[tier.make], tokens=64)
    rng = random.Random(0)
    ask_all(world, rng)
    stores, rounds = tier.tier.stores, 6
    for _ in range(rounds):
        ask_all(world, rng)
    # At least six blocks of a round are neither on the device nor in the tier; the last of them may still be on the
    # device.
    assert tier.tier.stores - stores >= 6 * (rounds - 1), "blocks that were computed again were not stored again"
    for seed in (0, 1) * 3:
        last = world.ask(prompt(seed, BLOCKS * SIZE + 1), max_tokens=1)
        settle(world)
    assert last.sources is not None
    assert last.sources.computed == 1
    world.close()


def test_a_tier_that_takes_nothing_is_not_offered_the_same_block_for_ever() -> None:
    tier = Fake("remote")
    world = World(tiers=[tier.make], tokens=64)
    tier.down()
    rng = random.Random(0)
    for _ in range(3):
        ask_all(world, rng)
    assert world.link.copied_out <= 3 * PROMPTS * (BLOCKS + 1), "blocks are copied again though nobody used them"
    world.close()


def test_a_block_refused_by_admission_is_offered_again_at_its_next_use() -> None:
    tier = Fake("disk")
    world = World(host=16, tiers=[tier.make], admission=SecondUse(), tokens=64)
    rng = random.Random(0)
    for _ in range(5):
        ask_all(world, rng)
    assert ask_all(world, rng) == PROMPTS * BLOCKS * SIZE
    world.close()
