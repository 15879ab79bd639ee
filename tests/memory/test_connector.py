"""The contract of every KV connector with the scheduler, and the additional promises of the tiered one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from spillover.memory.connector import KVConnector, NullConnector, Progress
from spillover.memory.kv.digest import prefix_keys
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.tiers.base import Ticket
from support.simulated import SLOT
from support.simulated_tiers import DictTier, MappedDictTier
from support.tiered_world import SIZE, World, prompt

PATIENCE = 10.0  # maximum seconds of any operation here
BLOCKS = 24


@dataclass
class Place:
    kv: KVCache
    connector: KVConnector
    stores: bool | None = True  # whether spilled blocks can be restored; None: some can
    covered: int = 0  # tokens that the sequence admitted last found on the device

    def check(self) -> None:
        self.kv.check()
        self.connector.check()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            self.connector.wait(0.002)
            self.connector.poll()
            self.check()

    def rest(self) -> None:
        self.connector.poll()
        self.until(lambda: not self.connector.busy and not self.kv.num_in_flight)

    def admit(self, seq: str, tokens: list[int]) -> int | None:
        """Admit as the scheduler does: look up, admit, and begin to load stored blocks."""
        self.until(lambda: self.connector.lookup(seq, tokens, None))
        self.covered = self.kv.admit(seq, tokens)
        end = self.connector.begin(seq, tokens, None)
        if end is not None:
            self.connector.forget(seq)
        return end

    def compute(self, seq: str, tokens: list[int], num_computed: int) -> bool:
        if self.kv.extend(seq, num_computed):
            self.kv.commit(seq, tokens, num_computed)
            return True
        return False

    def finish(self, seq: str, tokens: list[int], num_computed: int) -> None:
        """Adopt loaded blocks and compute the rest."""
        deadline = time.monotonic() + PATIENCE
        while num_computed < len(tokens):
            assert time.monotonic() < deadline
            self.connector.wait(0.001)
            self.connector.poll()
            progress = self.connector.progress(seq, num_computed)
            assert progress is not None
            end = self.connector.limit(seq, progress.num_computed, len(tokens))
            if end > progress.num_computed and self.compute(seq, tokens, end):
                num_computed = end
            else:
                num_computed = progress.num_computed

    def release(self, seq: str) -> None:
        self.connector.end(seq)
        self.kv.release(seq)


def null() -> Place:
    return Place(KVCache(BLOCKS, SIZE, (None,)), NullConnector(), stores=False)


def tiered(stores: bool | None = True, **options: object) -> Place:
    world = World(BLOCKS, eager=True, **options)  # type: ignore[arg-type]
    return Place(world.kv, world.connector, stores)


PLACES: dict[str, Callable[[], Place]] = {
    "null": null,
    "host": lambda: tiered(host=200),
    "disk": lambda: tiered(tiers=[DictTier]),
    "small host and remote": lambda: tiered(host=8, tiers=[lambda wake: DictTier(wake, "remote", lookup_delay=0.001)]),
    "pool": lambda: tiered(tiers=[lambda wake: MappedDictTier(wake, SIZE * SLOT.size)]),
    "a disk that is down": lambda: tiered(None, tiers=[lambda wake: down(DictTier(wake))]),
    "never": lambda: tiered(False, host=200, restore="never"),
}


def down(tier: DictTier) -> DictTier:
    tier.down = True
    return tier


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = PLACES[request.param]()
    yield made
    made.connector.close(time.monotonic() + PATIENCE)


def test_a_prompt_that_nobody_has_seen_is_computed(place: Place) -> None:
    tokens = prompt(1, 30)
    assert place.admit("a", tokens) == 30
    assert place.connector.progress("a", 0) == Progress(0)
    assert place.connector.limit("a", 0, 30) == 30
    assert place.connector.host_blocks("a") == ()
    assert place.compute("a", tokens, 30)
    place.release("a")
    place.rest()
    assert place.kv.stats.protected == 0


def test_what_was_never_begun_may_be_ended(place: Place) -> None:
    for _ in range(2):
        place.connector.forget("nobody")
        place.connector.end("nobody")
        place.connector.poll_loads()
        place.connector.poll(hurried=True)
        place.connector.observe(0, 1, 0.001)
        place.connector.reserve(3)
    assert place.connector.progress("nobody", 5) == Progress(5)
    assert place.connector.limit("nobody", 5, 6) == 6
    place.connector.clear(external=True)
    place.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_of_sequences(place: Place, seed: int) -> None:
    """Sequences that begin, load, compute and finish at any moment: progress is in whole blocks and never decreases,
    sources add up, and no block leaks."""
    rng = random.Random(seed)
    kv, connector = place.kv, place.connector
    live: dict[str, tuple[list[int], int]] = {}  # tokens, number computed
    loaded = 0
    for step in range(250):
        if len(live) < 3 and rng.random() < 0.4:
            seq, tokens = f"s{step}", prompt(rng.randrange(4), rng.randrange(10, 40))
            end = place.admit(seq, tokens)
            if end is None:
                place.release(seq)
                assert connector.lookup(seq, tokens, None), "a lookup outlives an attempt that found no room"
                connector.forget(seq)
                continue
            assert place.covered <= end <= len(tokens)
            assert end == len(tokens) or end % SIZE == 0
            live[seq] = (tokens, place.covered)
        elif live:
            seq = rng.choice(sorted(live))
            tokens, computed = live[seq]
            connector.poll_loads()
            progress = connector.progress(seq, computed)
            if progress is None:
                place.release(seq)
                del live[seq]
                continue
            assert progress.num_computed - computed == sum(progress.sources.values())
            assert (progress.num_computed - computed) % SIZE == 0
            loaded += progress.num_computed - computed
            computed = progress.num_computed
            end = connector.limit(seq, computed, len(tokens))
            assert computed <= end <= len(tokens)
            end = min(end, computed + rng.randrange(1, 20))
            if end > computed and place.compute(seq, tokens, end):
                computed = end
            live[seq] = (tokens, computed)
            if computed == len(tokens):
                assert connector.progress(seq, computed) == Progress(computed), "nothing is left to wait for"
            if computed == len(tokens) or rng.random() < 0.1:
                place.release(seq)
                del live[seq]
        if rng.random() < 0.5:
            connector.poll(hurried=rng.random() < 0.5)
        if rng.random() < 0.2:
            connector.wait(0.001)
        place.check()
    for seq in live:
        place.release(seq)
    place.rest()
    assert kv.stats.protected == 0
    hits = sum(report.hit_tokens for report in connector.reports())
    assert hits <= loaded, "what came from a slot on its way to a tier is no hit of that tier"
    assert place.stores in (loaded > 0, None)


# Only with tiers


@pytest.fixture
def world():  # type: ignore[no-untyped-def]
    made: list[World] = []

    def make(**options: object) -> tuple[World, Place]:
        made.append(World(**{"num_blocks": BLOCKS, "eager": True, **options}))  # type: ignore[arg-type]
        return made[-1], Place(made[-1].kv, made[-1].connector)

    yield make
    for each in made:
        each.close()


def push_out(place: Place, tokens: list[int]) -> None:
    """Store a prompt and evict it from the device with other prompts."""
    for number, text in enumerate([tokens, prompt(900, 80), prompt(901, 80)]):
        seq = f"push{number}"
        assert place.admit(seq, text) is not None
        place.finish(seq, text, place.covered)
        place.release(seq)
        place.rest()
    assert place.kv.match(tokens) == 0


@pytest.mark.parametrize("windows", [(None,), (None, 10)], ids=["full", "window"])
def test_stored_blocks_are_loaded_up_to_the_last_token(world, windows: tuple[int | None, ...]) -> None:  # type: ignore[no-untyped-def]
    _, place = world(num_blocks=BLOCKS * len(windows), windows=windows, host=400)
    tokens = prompt(1, 41)
    push_out(place, tokens)
    assert place.admit("a", tokens) == 0, "all is loaded, so nothing is computed meanwhile"
    assert place.connector.limit("a", 0, 41) == 0
    place.until(lambda: not place.kv.num_in_flight)
    progress = place.connector.progress("a", 0)
    assert progress == Progress(40, {"host": 40}, loading=False, ended=True)
    assert place.connector.limit("a", 40, 41) == 41
    assert place.compute("a", tokens, 41)
    place.release("a")
    place.check()


def test_tiers_are_asked_once_and_may_be_slow_to_answer(world) -> None:  # type: ignore[no-untyped-def]
    asked = 0

    class Counting(DictTier):
        def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
            nonlocal asked
            asked += 1
            return super().lookup(keys)

    _, place = world(tiers=[lambda wake: Counting(wake, "remote", lookup_delay=0.05, lookup_seconds=PATIENCE)])
    tokens = prompt(1, 30)
    assert not place.connector.lookup("a", tokens, None)
    place.until(lambda: place.connector.lookup("a", tokens, None))
    assert asked == 1
    place.connector.forget("a")
    assert not place.connector.lookup("a", tokens, None)
    assert asked == 2
    place.connector.forget("a")


def test_no_room_changes_nothing(world) -> None:  # type: ignore[no-untyped-def]
    _, place = world(host=400)
    tokens = prompt(1, 41)
    push_out(place, tokens)
    assert place.admit("big", prompt(7, 80)) is not None
    assert place.kv.extend("big", 80)
    place.kv.admit("a", tokens)
    assert place.connector.begin("a", tokens, None) is None
    assert place.kv.table("a") == []
    assert place.connector.progress("a", 0) == Progress(0)
    place.release("a")
    place.connector.forget("a")
    place.release("big")
    place.check()


def test_loads_that_nobody_waits_for_any_more_give_their_blocks_back(world) -> None:  # type: ignore[no-untyped-def]
    gate = threading.Event()
    made, place = world(host=400)
    tokens = prompt(1, 41)
    push_out(place, tokens)
    copy_in = made.link.copy_in

    def held(slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        gate.wait(PATIENCE)
        copy_in(slots, blocks)

    made.link.copy_in = held
    assert place.admit("a", tokens) == 0
    place.release("a")
    place.check()
    assert place.kv.num_in_flight > 0, "a copy under way may still write"
    gate.set()
    place.rest()
    assert place.kv.num_free == BLOCKS


def test_what_was_loaded_before_and_behind_a_copy_that_failed_counts(world) -> None:  # type: ignore[no-untyped-def]
    made, place = world(host=400)
    made.store.copies.batch = 2
    tokens = prompt(1, 41)
    push_out(place, tokens)
    copy_in, failing = made.link.copy_in, [3]

    def fails_third(slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        if blocks[0] == failing[0]:
            raise OSError("injected")
        copy_in(slots, blocks)

    made.link.copy_in = fails_third
    extend_to_load = place.kv.extend_to_load

    def extended(seq: str, num_blocks: int) -> bool:
        there = extend_to_load(seq, num_blocks)
        failing[0] = place.kv.table(seq)[4]
        return bool(there)

    place.kv.extend_to_load = extended
    assert place.admit("a", tokens) == 0
    place.until(lambda: not place.kv.num_in_flight)
    assert place.connector.progress("a", 0) == Progress(16, {"host": 16}, loading=False, ended=False)
    assert place.connector.limit("a", 16, 41) == 24, "the two blocks of the copy that failed are computed"
    assert place.compute("a", tokens, 24)
    assert place.connector.progress("a", 24) == Progress(40, {"host": 16}, loading=False, ended=True)
    place.release("a")
    place.check()


def test_a_block_that_host_memory_loses_before_it_is_loaded_is_computed(world) -> None:  # type: ignore[no-untyped-def]
    made, place = world(host=400)
    tokens = prompt(1, 41)
    push_out(place, tokens)
    lost = list(prefix_keys(tokens, SIZE, place.kv.cached_prefix(tokens, None)[1]))[4]
    extend_to_load, host = place.kv.extend_to_load, made.store._host

    def extended(seq: str, num_blocks: int) -> bool:
        host.drop(host.get(lost))
        return bool(extend_to_load(seq, num_blocks))

    place.kv.extend_to_load = extended
    assert place.admit("a", tokens) == 0
    place.until(lambda: not place.kv.num_in_flight)
    assert place.connector.progress("a", 0) == Progress(16, {"host": 16}, loading=False, ended=False)
    assert place.connector.limit("a", 16, 41) == 20
    assert place.compute("a", tokens, 20)
    assert place.connector.progress("a", 20) == Progress(40, {"host": 20}, loading=False, ended=True)
    place.release("a")
    place.check()


def test_a_tier_is_asked_for_many_blocks_at_once_however_few_one_copy_takes(world) -> None:  # type: ignore[no-untyped-def]
    """Loads are requested in bulk, so a disk sees which blocks begin the prefix, and a store needs few round trips."""
    made, place = world(tiers=[DictTier], staging=64, rates={"host": 1.0})
    assert made.store.copies.batch == 1
    tokens = prompt(1, 41)
    push_out(place, tokens)
    tier, asked = made.tiers[0], []
    load = tier.load

    def counted(items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        asked.append(len(items))
        return load(items)  # type: ignore[no-any-return]

    tier.load = counted
    assert place.admit("a", tokens) == 0
    assert asked == [10]
    place.finish("a", tokens, 0)
    place.release("a")
    place.rest()


def test_a_prompt_is_looked_for_on_the_device_once_where_host_memory_is_the_only_tier(world) -> None:  # type: ignore[no-untyped-def]
    _, place = world(host=400)
    tokens = prompt(1, 41)
    push_out(place, tokens)
    walk, walks = place.kv.tree.walk, []

    def counted(*arguments: object) -> object:
        walks.append(arguments)
        return walk(*arguments)

    place.kv.tree.walk = counted
    assert place.admit("a", tokens) == 0
    assert len(walks) == 1
    place.release("a")
    place.rest()


def test_a_window_that_misses_a_block_starts_over(world) -> None:  # type: ignore[no-untyped-def]
    fails = threading.Event()
    _, place = world(num_blocks=2 * BLOCKS, windows=(None, 10), host=400, fault=fails.is_set)
    tokens = prompt(1, 41)
    push_out(place, tokens)
    fails.set()
    assert place.admit("a", tokens) == 0
    place.until(lambda: not place.kv.num_in_flight)
    assert place.connector.progress("a", 0) is None
    place.release("a")
    fails.clear()
    place.rest()


def test_spills_and_offloads_under_way_at_once_each_end_with_their_own(world) -> None:  # type: ignore[no-untyped-def]
    gate = threading.Event()
    made, place = world(host=400, margin=20)
    copy_out = made.link.copy_out

    def held(blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        gate.wait(PATIENCE)
        copy_out(blocks, slots)

    made.link.copy_out = held
    old, long = prompt(1, 40), prompt(2, 48)
    assert place.admit("old", old) == 40
    assert place.compute("old", old, 40)
    place.release("old")
    place.connector.poll()  # begins to spill blocks that no request holds
    assert place.admit("long", long) == 48
    assert place.compute("long", long, 48)
    spilling = place.kv.num_in_flight
    assert spilling > 0
    assert place.connector.offload("long", 4)
    assert place.connector.offload("long", 4), "blocks are on their way"
    assert place.kv.num_in_flight == spilling + 4
    assert place.connector.host_blocks("long") == ()
    gate.set()
    place.rest()
    assert len(place.connector.host_blocks("long")) == 4
    assert place.kv.table("long")[:5] == [0, 0, 0, 0, place.kv.table("long")[4]]
    place.release("long")
    place.check()
    assert place.connector.host_blocks("long") == ()
    assert place.kv.num_free == BLOCKS
