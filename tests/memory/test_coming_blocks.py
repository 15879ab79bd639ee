"""Blocks that another engine is storing: how long a prompt waits for them, and how soon its own are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.spill.loads import Search
from spillover.memory.spill.restore import COMING_SECONDS, LEAST_SECONDS, Lookups
from spillover.memory.spill.restore_plan import ComputeCost
from support.simulated_tiers import DictTier
from support.tiered_world import SIZE, World, prompt

STEP = 0.0005  # seconds of simulated time


class Filling:
    """A store whose tier contains a growing number of a prompt's blocks."""

    tiers = ("pool",)
    keeps = False

    def __init__(self) -> None:
        self.there = 0
        self.questions = 0

    def search(self, keys: Sequence[bytes]) -> Search:
        search = Search([None] * len(keys), lambda tier, index, there: None)
        self.search_again(search, keys)
        return search

    def search_again(self, search: Search, keys: Sequence[bytes]) -> None:
        self.questions += 1
        assert len(search.sources) == len(keys)
        search.sources[: self.there] = ["pool"] * min(self.there, len(keys))


    def near(self, keys: Sequence[bytes]) -> list[str | None]:
        return [None] * len(keys)


def waited(gaps: Sequence[float], token_seconds: float | None) -> tuple[float, int]:
    """Simulate blocks that arrive with these gaps; return how long the prompt waits, and how many it then finds."""
    store: Any = Filling()
    lookups = Lookups(KVCache(64, SIZE, (None,)), store)
    tokens = prompt(1, len(gaps) * SIZE + 1)
    times = list(accumulate(gaps))
    store.there = sum(at <= 0 for at in times)
    assert lookups.lookup("a", tokens, None)
    cost, steps = ComputeCost(token_seconds), 0
    while lookups.should_wait("a", cost, steps * STEP):
        steps += 1
        assert steps * STEP < 2 * COMING_SECONDS
        store.there = sum(at <= steps * STEP for at in times)
    assert store.questions <= 2 + steps
    return steps * STEP, len(lookups.found("a", tokens, None, 0).tiers)


@given(st.lists(st.floats(0, 0.02), min_size=1, max_size=30), st.sampled_from([1e-5, 1e-3, 0.1, None]))
@settings(max_examples=60, deadline=None)
def test_waiting_costs_no_more_than_computing_would(gaps: list[float], token_seconds: float | None) -> None:
    seconds, found = waited(gaps, token_seconds)
    assert seconds <= COMING_SECONDS + 2 * STEP
    at = list(accumulate(gaps))
    if found < len(gaps):  # it gave up: no block had arrived for as long as computing all missing ones takes
        silence = seconds - (at[found - 1] if found else 0.0)
        computing = (len(gaps) - found) * SIZE * (token_seconds or COMING_SECONDS)
        assert silence > max(computing, LEAST_SECONDS) - 0.01 or seconds > COMING_SECONDS - 0.01
    else:
        assert seconds <= at[-1] + 0.01, "it waits no longer than for the last"


def test_what_keeps_coming_is_waited_for_and_what_never_comes_is_computed() -> None:
    assert waited([0.004] * 20, 1e-5)[1] == 20
    assert waited([0.0] * 10, 1e-3) == (0.0, 10)
    nothing, found = waited([9.0] * 5, 1e-3)
    assert found == 0
    assert nothing == pytest.approx(max(LEAST_SECONDS, 5 * SIZE * 1e-3), abs=0.002)
    assert waited([9.0] * 5, None)[0] == pytest.approx(COMING_SECONDS, abs=0.002)


def test_a_part_of_a_prompt_leaves_while_the_next_is_computed() -> None:
    """With --spill eager blocks are copied also during steps that compute prompts, when other copies wait."""
    for eager in (True, False):
        world = World(24, eager=eager, tiers=[DictTier])
        tokens = prompt(1, 40)
        world.kv.admit("a", tokens)
        assert world.kv.extend("a", 20)
        world.kv.commit("a", tokens, 20)
        world.connector.poll(hurried=True)
        assert (world.kv.num_in_flight > 0) is eager
        world.close()


def test_more_blocks_than_there_are_slots_leave_while_one_step_runs() -> None:
    """If a step computes more blocks than staging holds, all are copied one after another during the next step."""
    world = World(24, eager=True, tiers=[DictTier], staging=4)
    tokens = prompt(1, 20 * SIZE)
    world.kv.admit("a", tokens)
    assert world.kv.extend("a", len(tokens))
    world.kv.commit("a", tokens, len(tokens))
    (tier,) = world.store.tiers
    assert isinstance(tier, DictTier)
    running = Running(lambda: len(tier.blocks) == 20)
    world.engine._poll_urgent_spills(running)  # type: ignore[arg-type]
    assert len(tier.blocks) >= 16  # the last few may be in flight
    world.close()


def test_the_blocks_of_the_last_step_leave_though_nobody_asks_for_anything_more() -> None:
    world = World(24, eager=True, tiers=[DictTier])
    world.ask(prompt(1, 30), max_tokens=1)
    (tier,) = world.store.tiers
    assert isinstance(tier, DictTier)
    assert len(tier.blocks) == 30 // SIZE
    world.close()


class Running:
    """A step that computes a prompt until a condition holds, or done() was called too often."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.step = SimpleNamespace(has_prefill=True)
        self._ended = ended
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        return self._ended() or self._asked > 2000
