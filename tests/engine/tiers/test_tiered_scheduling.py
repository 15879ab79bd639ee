"""Conversations over a device pool far too small for them, with KV spilled to other tiers and restored."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from spillover.engine.requests.request import Request, Status
from spillover.memory.policies.admission import SecondUse
from support.simulated import SLOT, expected_tokens
from support.simulated_tiers import DictTier, MappedDictTier
from support.tiered_world import LENGTH, PATIENCE, SIZE, World, prompt


def disk(wake: Callable[[], None]) -> DictTier:
    return DictTier(wake)


class Faults:
    """Decides at a given rate that a copy fails, and counts the failures."""

    def __init__(self, seed: int, rate: float) -> None:
        self.injected = 0
        self._rng, self._rate = random.Random(seed), rate

    def __call__(self) -> bool:
        fails = self._rng.random() < self._rate
        self.injected += fails
        return fails


def remote(wake: Callable[[], None]) -> DictTier:
    return DictTier(wake, "remote", lookup_delay=0.002)


def pool(wake: Callable[[], None]) -> MappedDictTier:
    return MappedDictTier(wake, SIZE * SLOT.size)


PLACES = {
    "host": {"host": 400},
    "small host": {"host": 16},
    "disk": {"tiers": [disk]},
    "remote": {"tiers": [remote]},
    "host and disk": {"host": 16, "tiers": [disk]},
    "pool": {"tiers": [pool]},
    "pool and disk": {"tiers": [pool, disk]},
    "all": {"host": 16, "tiers": [pool, disk, remote]},
}


@pytest.mark.parametrize("place", [place for place in PLACES if place != "small host"])
@pytest.mark.parametrize("windows", [(None,), (None, 10)], ids=["full", "window"])
def test_an_evicted_prefix_comes_back(place: str, windows: tuple[int | None, ...]) -> None:
    world = World(40 if len(windows) > 1 else 24, windows, **PLACES[place])  # type: ignore[arg-type]
    first = world.ask(prompt(1, 41))
    assert first.sources is not None
    assert first.sources.computed == 41
    for seed in range(2, 5):
        world.ask(prompt(seed, 60))  # evicts the first prompt
    again = world.ask(prompt(1, 41))
    assert again.sources is not None
    found = again.sources.host + again.sources.pool + again.sources.disk + again.sources.remote
    assert found > 0, again.sources
    assert again.sources.computed < 41
    assert world.link.copied_in > 0
    assert world.link.copied_out > 0
    world.close()


def conversations(world: World, rng: random.Random, count: int, rounds: int, abort: float) -> int:
    """Run conversations in which every round sends all previous turns; return the number of checked answers."""
    histories = [prompt(1000 + i, rng.randrange(5, 40)) for i in range(count)]
    checked = 0
    for _ in range(rounds):
        order = rng.sample(range(count), count)
        for start in range(0, count, 6):
            live: list[tuple[int, Request]] = []
            for i in order[start : start + 6]:
                if len(histories[i]) < 80:
                    live.append((i, world.request(list(histories[i]), rng.randrange(1, 12), f"salt{i % 2}")))
            deadline = time.monotonic() + PATIENCE
            while any(r.status is not Status.FINISHED for _, r in live):
                steps = world.engine.num_steps
                if not world.engine.step() and world.engine.num_steps == steps:
                    world.engine.wait(0.002)
                world.scheduler.check()
                if live and rng.random() < abort:
                    world.scheduler.stop(rng.choice(live)[1], "abort")
                assert time.monotonic() < deadline, "the engine hangs"
            for i, request in live:
                if request.finish_reason != "abort":
                    assert request.output_token_ids == expected_tokens(request, LENGTH)
                    assert request.sources is not None
                    assert request.sources.total == request.num_prompt
                    histories[i] += request.output_token_ids + prompt(rng.randrange(10**6), rng.randrange(1, 9))
                    checked += 1
    world.run()
    return checked


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["always", "auto", "auto slow", "eager"])
def test_conversations(place: str, mode: str) -> None:
    """Whatever is spilled and restored, every token equals that of a run without a cache."""
    rng = random.Random(f"{place}{mode}")
    world = World(restore=mode.split()[0] if mode != "eager" else "always", eager=mode == "eager",
                  prefill_seconds=1e-5 if mode == "auto slow" else 1e-3, rates={"disk": 1e5, "remote": 1e5},
                  **PLACES[place])  # type: ignore[arg-type]
    assert conversations(world, rng, 12, 4, 0.01) > 30
    assert world.link.copied_out > 0
    if not mode.startswith("auto") and place != "small host":  # in those, possibly nothing is worth loading
        assert world.link.copied_in > 0
    world.close()


def test_conversations_of_a_model_that_has_windows_alone() -> None:
    """Blocks of a restored prefix before every window need not be loaded, and count as found in their tier."""
    world = World(windows=(6,), host=400)
    assert conversations(world, random.Random(3), 12, 4, 0.01) > 30
    assert world.link.copied_in > 0
    world.close()


@pytest.mark.parametrize("windows", [(None,), (None, 10)], ids=["full", "window"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("below", [{"host": 60, "tiers": [disk]}, {"tiers": [pool]}], ids=["host and disk", "pool"])
def test_conversations_with_a_failing_link(below: dict[str, Any], windows: tuple[int | None, ...],
                                           overlap: bool) -> None:
    rng, faults = random.Random(5), Faults(6, 0.01)
    world = World(48, windows, overlap=overlap, fault=faults, **below)
    assert conversations(world, rng, 12, 4, 0.02) > 25
    assert world.link.copied_in > 0
    assert faults.injected > 0
    world.close()


def test_a_long_prefix_is_computed_from_the_front_and_loaded_from_the_back() -> None:
    slow = lambda wake: DictTier(wake, delay=0.004)  # noqa: E731
    world = World(64, tiers=[slow], restore="auto", tokens=8, staging=4, rates={"disk": SIZE * 6 / 1e-3},
                  prefill_seconds=1e-3 / SIZE)
    text = prompt(1, 161)
    world.ask(text)
    for seed in range(2, 6):
        world.ask(prompt(seed, 200))
    world.connector.cost.token_seconds = 1e-3 / SIZE  # as if computing took as long as loading
    world.store.rates["disk"] = SIZE * 6 / 1e-3
    again = world.ask(text)
    assert again.sources is not None
    assert again.sources.disk > 0, again.sources
    assert again.sources.computed > 8, again.sources
    world.close()


def test_a_lookup_that_never_answers_is_given_up_at_its_deadline() -> None:
    hung = threading.Event()

    class Hanging(DictTier):
        def lookup(self, keys: Sequence[bytes]):  # type: ignore[no-untyped-def]
            return self._lane.submit(lambda: [hung.wait(30)] * len(keys), time.monotonic() + 0.1)

    world = World(tiers=[lambda wake: Hanging(wake, "remote")])
    started = time.monotonic()
    world.ask(prompt(1, 30))
    assert time.monotonic() - started < 10
    hung.set()
    world.close()


def test_a_load_that_hangs_is_computed_instead() -> None:
    hung = threading.Event()

    class Hanging(DictTier):
        def load(self, items):  # type: ignore[no-untyped-def]
            return [self._lane.submit(lambda: hung.wait(30), time.monotonic() + 0.1) for _ in items]

    world = World(host=8, tiers=[lambda wake: Hanging(wake)])
    world.ask(prompt(1, 41))
    for seed in range(2, 6):
        world.ask(prompt(seed, 60))
    request = world.request(prompt(1, 41))
    deadline = time.monotonic() + 10
    while request.status is not Status.FINISHED:
        world.engine.step()
        world.engine.wait(0.002)
        world.scheduler.check()
        assert time.monotonic() < deadline
    assert request.output_token_ids == expected_tokens(request, LENGTH)
    hung.set()
    world.run()
    world.close()


def test_others_go_on_while_a_request_waits_for_its_blocks() -> None:
    gate = threading.Event()

    class Slow(DictTier):
        def _get(self, key: bytes, view: memoryview) -> bool:
            gate.wait(10)
            return super()._get(key, view)

    world = World(tiers=[lambda wake: Slow(wake)])
    world.ask(prompt(1, 41))
    for seed in range(2, 5):
        world.ask(prompt(seed, 60))
    waits, other = world.request(prompt(1, 41)), world.request(prompt(9, 10))
    deadline = time.monotonic() + 10
    while other.status is not Status.FINISHED:
        world.engine.step()
        world.engine.wait(0.002)
        assert time.monotonic() < deadline
    assert waits.first_token == 0.0
    gate.set()
    world.run()
    assert waits.output_token_ids == expected_tokens(waits, LENGTH)
    world.close()


def test_other_salts_never_share() -> None:
    world = World(host=400, eager=True)
    world.ask(prompt(1, 41), salt="a")
    other = world.ask(prompt(1, 41), salt="b")
    assert other.sources is not None
    assert other.sources.computed == 41
    world.close()


def test_blocks_used_once_are_not_stored_under_second_use() -> None:
    world = World(host=400, admission=SecondUse())
    world.ask(prompt(1, 41))
    for seed in range(2, 6):
        world.ask(prompt(seed, 60))
    assert world.link.copied_out == 0
    world.ask(prompt(1, 41))
    for seed in range(6, 10):
        world.ask(prompt(seed, 60))
    assert world.link.copied_out > 0
    world.close()


def test_closing_writes_what_only_memory_has_to_the_tiers_that_last() -> None:
    world = World(64, host=100, tiers=[disk])
    world.ask(prompt(1, 81))
    assert not world.tiers[0].blocks
    world.close()
    assert len(world.tiers[0].blocks) >= 20


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("place", ["host", "all"])
def test_a_sequence_longer_than_the_device(place: str, overlap: bool) -> None:
    """The first blocks of a sequence longer than the device stay in host memory, where every step reads them."""
    options = {"host": {"host": 100}, "all": {"host": 100, "tiers": [disk, remote]}}[place]
    world = World(80, overlap=overlap, tokens=32, **options)  # type: ignore[arg-type]
    short = world.ask(prompt(3, 30))
    long = world.ask(prompt(1, 350), max_tokens=40)  # 98 blocks of 4 tokens; the device has 80
    assert long.finish_reason == "length"
    assert len(long.output_token_ids) == 40
    assert any(item.host_blocks for step in world.runner.steps for item in step.items)
    assert all(len(step.items) == 1 for step in world.runner.steps if any(item.host_blocks for item in step.items))
    assert world.ask(prompt(3, 30)).output_token_ids == short.output_token_ids
    world.close()


def test_a_sequence_that_grows_past_the_device_while_others_wait() -> None:
    world = World(80, host=100)
    long, others = world.request(prompt(1, 300), 90), [world.request(prompt(i, 40), 20) for i in range(2, 6)]
    world.run()
    for request in (long, *others):
        assert request.output_token_ids == expected_tokens(request, LENGTH)
    assert any(item.host_blocks for step in world.runner.steps for item in step.items)
    assert world.kv.stats.protected == 0
    world.close()


def test_a_long_sequence_survives_a_failing_link_or_ends_cleanly() -> None:
    injected = 0
    for seed in range(6):
        faults = Faults(seed, 0.02)
        world = World(80, host=100, fault=faults)
        request = world.request(prompt(1, 350), 40)
        world.run()
        expected = expected_tokens(request, LENGTH)
        assert request.output_token_ids == expected[: len(request.output_token_ids)]
        assert request.finish_reason == "length"
        injected += faults.injected
        world.check()
        world.close()
    assert injected > 0


@pytest.mark.parametrize("windows", [(None,), (None, 10)], ids=["full", "window"])
def test_a_preempted_request_takes_its_blocks_up_again(windows: tuple[int | None, ...]) -> None:
    """A preempted request's blocks are spilled when others need the space, and restored rather than recomputed."""
    world = World(40 * len(windows), windows, host=400, tokens=64, margin=20)
    requests = [world.request(prompt(i, 50), 60) for i in range(4)]
    deadline = time.monotonic() + PATIENCE
    while world.engine.has_work:
        world.engine.step()
        world.scheduler.check()
        while world.kv.num_in_flight:  # a simulated step takes no time, and would outrun every copy
            world.connector.poll()
            world.engine.wait(0.002)
            assert time.monotonic() < deadline, "a copy hangs"
    for request in requests:
        assert request.output_token_ids == expected_tokens(request, LENGTH)
    assert world.scheduler.num_preemptions > 0
    report = next(report for report in world.store.reports() if report.name == "host")
    assert report.hit_tokens > 0
    assert report.bytes_out > 0
    world.close()


@pytest.mark.parametrize("decoding", [0, 2])
def test_copies_leave_blocks_to_those_that_decode(decoding: int) -> None:
    """A prompt does not take the last free blocks, because the last of those that it could evict are in flight."""
    world = World(12, host=400)
    gate = threading.Event()
    copy_out = world.link.copy_out

    def held(blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        gate.wait(10)
        copy_out(blocks, slots)

    world.link.copy_out = held  # type: ignore[method-assign]
    kv = world.kv
    kv.admit("old", tokens := prompt(1, 32))
    assert kv.extend("old", 32)
    kv.commit("old", tokens, 32)
    kv.release("old")  # eight evictable blocks, the last one first
    world.connector.reserve(decoding)
    kv.admit("prompt", prompt(2, 32))
    assert kv.extend("prompt", 16, urgent=False) == (decoding == 0)
    world.connector.poll()  # copies begin, and none completes
    kv.admit("decode", prompt(3, 4))
    assert kv.extend("decode", 4) == (decoding > 0)
    world.check()
    gate.set()
    for seq in ("prompt", "decode"):
        kv.release(seq)
    world.run()
    world.close()


def test_blocks_that_were_lost_are_told() -> None:
    """If a decoding request takes blocks that were not copied yet, the nearest tier's report counts them as dropped."""
    for place in ("host", "disk"):
        world = World(8, **PLACES[place])  # type: ignore[arg-type]
        kv = world.kv
        kv.admit("old", tokens := prompt(1, 32))
        assert kv.extend("old", 32)
        kv.commit("old", tokens, 32)
        kv.release("old")
        kv.admit("decode", prompt(3, 4))
        assert kv.extend("decode", 12)
        assert world.store.reports()[0].dropped == 3
        kv.release("decode")
        world.close()


def test_prompts_put_copies_off_while_there_is_room() -> None:
    """A step with part of a prompt leaves copies to steps that only decode, unless blocks run short."""
    world = World(200, host=400, tokens=36, margin=100)
    poll, during = world.store.poll, 0

    def counted() -> None:
        nonlocal during
        during += world.runner.steps[-1].has_prefill
        poll()

    chat = world.request(prompt(1, 20), 300)
    while not chat.output_token_ids:
        world.engine.step()
    world.store.poll = counted  # type: ignore[method-assign]
    for seed in range(2, 30):
        world.request(prompt(seed, 100), 1)
        for _ in range(8):
            world.engine.step()
            world.scheduler.check()
            time.sleep(0.0005)  # a simulated step takes no time, and would outrun every copy
    world.run()
    mixed = sum(step.has_prefill for step in world.runner.steps)
    assert during < mixed / 4
    assert world.store.spilled_blocks > 100
    assert chat.output_token_ids == expected_tokens(chat, LENGTH)
    world.close()


@pytest.mark.parametrize("place", ["host", "host and disk"])
def test_a_long_prompt_alone_keeps_copies_going(place: str) -> None:
    """A long prompt without any decode steps has blocks copied before it overwrites them."""
    world = World(60, tokens=16, **PLACES[place])  # type: ignore[arg-type]
    for seed in range(1, 5):
        world.ask(prompt(seed, 200), 1)
    assert world.store.spilled_blocks > 60
    assert world.store.dropped == 0
    assert world.ask(prompt(4, 200), 1).sources.computed < 200  # type: ignore[union-attr]
    world.close()
