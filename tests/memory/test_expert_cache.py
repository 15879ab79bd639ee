"""Slots of experts: each belongs to at most one expert, whatever is evicted; and predictions from recorded routing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.errors import SpilloverError
from spillover.memory.experts import ExpertCache
from spillover.memory.policies.experts import LFRU, Belady, ExpertPolicy, LRUQuota, NextLayer, Static, expert_policy
from spillover.memory.routing import distinct, extended, read_log, simulate, uniform

POLICIES = [LRUQuota, LFRU, NextLayer, Static]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(POLICIES), st.integers(1, 3), st.integers(2, 12), st.integers(1, 12))
def test_slots_are_never_shared_or_lost(seed: int, policy: type[ExpertPolicy], layers: int, experts: int,
                                        quota: int) -> None:
    rng = random.Random(seed)
    cache = ExpertCache(layers, experts, quota, policy())
    lent: list[tuple[int, range]] = []
    for step in range(60):
        layer = rng.randrange(layers)
        wanted = rng.sample(range(experts), rng.randint(1, min(experts, max(1, cache.quota - 1))))
        cache.policy.on_route(step, layer, wanted)
        for expert in wanted:
            if cache.lookup(layer, expert) is None:
                slot = cache.assign(layer, expert, keep=wanted)
                if slot is not None:
                    assert cache.slot(layer, expert) == slot
        action = rng.random()
        if action < 0.1 and (slots := cache.lend(layer)):
            lent.append((layer, slots))
        elif action < 0.2 and lent:
            cache.return_slots(*lent.pop())
        cache.check()


def test_who_is_kept_stays_and_who_is_worth_least_goes() -> None:
    cache = ExpertCache(1, 8, 3, LRUQuota())
    for expert in (0, 1, 2):
        cache.assign(0, expert)
    assert cache.lookup(0, 0) is not None
    cache.assign(0, 5, keep=[1])
    assert sorted(cache.resident(0)) == [0, 1, 5]  # 2 was the least recently used of those that may be evicted
    assert cache.assign(0, 6, keep=[0, 1, 5]) is None


def test_static_never_gives_up_its_own() -> None:
    cache = ExpertCache(1, 16, 8, Static(6))
    for expert in range(8):
        cache.assign(0, expert)
    for expert in (9, 10, 11, 12):
        cache.assign(0, expert)
    assert set(range(6)) <= set(cache.resident(0))
    assert cache.assign(0, 13, keep=(11, 12)) is None
    assert cache.assign(0, 13, keep=(11, 12), pinned=True) is not None  # unless nothing else can be evicted
    assert sorted(cache.resident(0)) == [1, 2, 3, 4, 5, 11, 12, 13]


@pytest.mark.parametrize("seed", range(4))
def test_nobody_beats_who_knows_the_future(seed: int) -> None:
    rng = random.Random(seed)
    liked = [rng.sample(range(32), 10) for _ in range(3)]
    trace = [[rng.sample(liked[layer] if rng.random() < 0.8 else range(32), 4) for layer in range(3)]
             for _ in range(120)]
    rates = {type(policy).__name__: simulate(trace, 32, 9, policy).hit_rate
             for policy in (LRUQuota(), LFRU(), Static(), Belady(distinct(trace)))}
    assert rates["Belady"] == max(rates.values())
    assert rates["LRUQuota"] > rates["Static"]


def test_uniform_routing_hits_as_often_as_there_are_slots() -> None:
    counts = simulate(uniform(300, 2, 32, 4), 32, 16, LRUQuota(), warm=50)
    assert counts.hit_rate == pytest.approx(0.5, abs=0.05)


def test_a_log_is_read_and_widened(tmp_path: Path) -> None:
    log = tmp_path / "routes.csv"
    rows = [f"0,1,{step},{layer},{slot},{(step + layer + 3 * slot) % 8},0.5"
            for step in range(5) for layer in range(2) for slot in range(2)]
    log.write_text("# made by hand\nturn,phase,step,layer,slot,expert,weight\n" + "\n".join(rows) + "\n")
    trace = read_log(log)
    assert trace[3][1] == [4, 7]
    wide = extended(trace, 8, 3, layers=4)
    assert all(len(set(chosen)) == 3 for step in wide for chosen in step)
    assert [chosen[:2] for chosen in wide[3]] == [trace[3][0], trace[3][1]] * 2


def test_what_is_no_log_and_no_policy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SpilloverError, match="not a routing log"):
        read_log(tmp_path / "other.csv")
    with pytest.raises(SpilloverError, match="lru, lfru"):
        expert_policy("mru")
    with pytest.raises(SpilloverError, match="no method on_load"):
        expert_policy("collections:OrderedDict")
