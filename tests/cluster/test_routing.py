"""Routing in simulated time: cache hits, waiting times, and known faults of other routers."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster import fleet as fleet_module
from spillover.cluster.fleet import Keys, Prompt
from spillover.cluster.policy import POLICIES
from spillover.cluster.replica import ReplicaReport
from spillover.memory.kv.event_wire import CPU, GPU, STORAGE
from support.servers.fleet_simulation import BLOCK, Arrival, ceiling, make_fleet, simulate

TOKEN = 1e-4


def tenants(seed: int, count: int, users: int, prefix: int, own: int, rate: float) -> list[Arrival]:
    """Return requests of `count` tenants with a long prefix each, from users in random order, as a Poisson process."""
    draw, names = random.Random(seed), itertools.count(1)
    prefixes = [tuple(next(names) for _ in range(prefix)) for _ in range(count)]
    asked = [tenant for tenant in range(count) for _ in range(users)]
    draw.shuffle(asked)
    times = itertools.accumulate(draw.expovariate(rate) for _ in asked)
    return [Arrival(time, prefixes[tenant] + tuple(next(names) for _ in range(own)), 16)
            for time, tenant in zip(times, asked, strict=True)]


@given(seed=st.integers(0, 10**6), load=st.floats(0.1, 0.6))
@settings(max_examples=2, deadline=None)
def test_shared_prefixes_are_found_as_often_as_can_be_and_answered_sooner(seed: int, load: float) -> None:
    """The hit rate is near its maximum, on average over ten draws: in one of them several requests of a tenant may come
    at once, and the prefix is worth computing twice."""
    prefix, own = 100, 20
    seconds = own * BLOCK * TOKEN  # of a request with a cached prefix
    found = []
    for draw in range(10):
        arrivals = tenants(seed + draw, 20, 10, prefix, own, 4 * load / seconds / 2)
        routed = simulate("predicted", arrivals, token_seconds=TOKEN)
        blind = simulate("round-robin", arrivals, token_seconds=TOKEN)
        assert routed.mean <= blind.mean
        found.append(routed.hit_rate / ceiling(arrivals))
    assert sum(found) / len(found) >= 0.98
    assert min(found) >= 0.95


@given(seed=st.integers(0, 10**6), load=st.floats(0.05, 1.2), sizes=st.sampled_from([(4, 4), (1, 40), (1, 200)]),
       output=st.sampled_from([0, 64]))
@settings(max_examples=8, deadline=None)
def test_without_reuse_nobody_waits_longer_than_by_turns(seed: int, load: float, sizes: tuple[int, int],
                                                         output: int) -> None:
    draw, names = random.Random(seed), itertools.count(1)
    seconds = sum(sizes) / 2 * BLOCK * TOKEN
    times = itertools.accumulate(draw.expovariate(4 * load / seconds) for _ in range(240))
    arrivals = [Arrival(time, tuple(next(names) for _ in range(draw.randint(*sizes))), output) for time in times]
    routed = simulate("predicted", arrivals, token_seconds=TOKEN, decode_seconds=TOKEN * 4)
    blind = simulate("round-robin", arrivals, token_seconds=TOKEN, decode_seconds=TOKEN * 4)
    assert routed.mean <= blind.mean / 0.98
    assert routed.finished <= blind.finished / 0.98
    assert routed.hits == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_request_at_a_time_uses_every_replica(policy: str) -> None:
    """Every replica is used, unlike in routers that send everything to replica 0 at low concurrency."""
    names = itertools.count(1)
    arrivals = [Arrival(float(time), tuple(next(names) for _ in range(20))) for time in range(40)]
    served = simulate(policy, arrivals).served
    assert min(served) >= 8


def test_conversations_with_a_common_beginning_spread_when_memory_fills() -> None:
    """A single shared block does not make one replica evict conversations that empty ones could hold."""
    names = itertools.count(100)
    chats = [(1, 2, *(next(names) for _ in range(40))) for _ in range(24)]
    arrivals = [Arrival(float(turn * len(chats) + place), chat + tuple(range(10**6 * (place + 1), 10**6 * (place + 1)
                                                                             + 4 * turn)))
                for turn in range(4) for place, chat in enumerate(chats)]
    outcome = simulate("predicted", arrivals, capacity=400)  # a replica holds 7 to 9 of the conversations
    assert min(outcome.served) >= 8
    assert outcome.hit_rate >= 0.85 * ceiling(arrivals)


def test_locality_is_kept_among_those_within_reach() -> None:
    """Locality is kept beyond any difference in load, unlike in routers that give it up when it is needed most."""
    for policy in ("predicted", "prefix"):
        fleet = make_fleet(policy, 4)
        keys = tuple(range(1, 201))
        for place in (1, 3):
            fleet.prefix_index.store(place, GPU, keys)
        for replica in fleet.replicas:
            replica.update(ReplicaReport(TOKEN))
        for busy in range(40):  # replica 1 is far behind; 3 also has the prefix, and little work
            prompt = Prompt(2000, {"space": Keys(tuple(range(1000 * (busy + 1), 1000 * (busy + 1) + 125)), BLOCK)})
            decision = fleet.decide(prompt, 0.0, [each for each in fleet.replicas if each.index != 1])
            assert decision is not None
            fleet.send(prompt, decision, 0.0)
        chosen = fleet.decide(Prompt(200 * BLOCK + 40, {"space": Keys(keys, BLOCK)}), 0.0)
        assert chosen is not None
        assert chosen.replica.index == 3


def test_a_hot_prefix_comes_to_lie_on_several_replicas() -> None:
    """A hot prefix is copied to several replicas, unlike in routers that pin it to one while others are idle."""
    names, hot = itertools.count(10_000), tuple(range(1, 31))
    arrivals = [Arrival(place * 0.004, hot + tuple(next(names) for _ in range(10)), 8) for place in range(400)]
    outcome = simulate("predicted", arrivals, token_seconds=TOKEN, decode_seconds=TOKEN)
    assert min(outcome.served) >= 40
    assert outcome.mean < simulate("prefix", arrivals, token_seconds=TOKEN, decode_seconds=TOKEN).mean * 1.05


def test_an_overloaded_replica_gets_no_misses() -> None:
    """A miss is not sent to an overloaded replica, unlike in routers that choose the one with the smallest tree."""
    fleet = make_fleet("predicted", 2)
    for replica in fleet.replicas:
        replica.update(ReplicaReport(TOKEN))
    fleet.prefix_index.store(1, GPU, range(1, 5000))  # replica 1 holds most and gets all the work; replica 0 holds none
    for place in range(8):
        prompt = Prompt(8000, {"space": Keys((), BLOCK)})
        decision = fleet.decide(prompt, 0.0, [fleet.replicas[1]])
        assert decision is not None, place
        fleet.send(prompt, decision, 0.0)
    chosen = fleet.decide(Prompt(4000, {"space": Keys(tuple(range(10_000, 10_250)), BLOCK)}), 0.0)
    assert chosen is not None
    assert chosen.replica.index == 1


def test_a_few_long_prompts_weigh_more_than_many_short_ones() -> None:
    """Work is counted in tokens, unlike in routers that count requests."""
    fleet = make_fleet("predicted", 2)
    for replica in fleet.replicas:
        replica.update(ReplicaReport(TOKEN))
    for tokens, place, times in ((32_000, 0, 2), (100, 1, 20)):
        for _ in range(times):
            decision = fleet.decide(Prompt(tokens), 0.0, [fleet.replicas[1 - place]])
            assert decision is not None
            fleet.send(Prompt(tokens, output_tokens=1), decision, 0.0)
    chosen = fleet.decide(Prompt(1000, output_tokens=1), 0.0)
    assert chosen is not None
    assert chosen.replica.index == 1


def test_what_other_routers_sent_counts() -> None:
    """Work sent by other routers is counted, unlike in routers that each see only their share."""
    fleet = make_fleet("predicted", 2)
    fleet.replicas[0].update(ReplicaReport(TOKEN, waiting_tokens=50_000, running=10))
    fleet.replicas[1].update(ReplicaReport(TOKEN))
    chosen = fleet.decide(Prompt(1000), 0.0)
    assert chosen is not None
    assert chosen.replica.index == 1


def test_sessions_are_told_apart_by_their_whole_name() -> None:
    """Sessions are distinguished by their whole name, unlike in routers that confuse session-1 and session-12."""
    fleet = make_fleet("predicted", 16)
    went: dict[str, int] = {}
    for turn in range(3):
        for number in range(13):
            prompt = Prompt(500, session=f"session-{number}")
            decision = fleet.decide(prompt, float(turn * 100 + number))
            assert decision is not None
            flight = fleet.send(prompt, decision, 0.0)
            fleet.end(flight, 0.0)
            assert went.setdefault(f"session-{number}", decision.replica.index) == decision.replica.index
    assert len(set(went.values())) == 13


def test_a_session_leaves_a_replica_that_is_far_behind() -> None:
    fleet = make_fleet("predicted", 2)
    for replica in fleet.replicas:
        replica.update(ReplicaReport(TOKEN))
    first = fleet.decide(Prompt(100, session="one"), 0.0)
    assert first is not None
    fleet.end(fleet.send(Prompt(100, session="one"), first, 0.0), 0.0)
    first.replica.update(ReplicaReport(TOKEN, waiting_tokens=100_000))
    second = fleet.decide(Prompt(100, session="one"), 1.0)
    assert second is not None
    assert second.replica is not first.replica


@given(lengths=st.lists(st.tuples(*[st.integers(0, 30)] * 3), min_size=2, max_size=5), rates=st.tuples(
    st.floats(1e-5, 1e-2), st.floats(1e-5, 1e-2)))
@settings(max_examples=60, deadline=None)
def test_the_chosen_replica_is_the_soonest_by_its_own_tiers(lengths: list[tuple[int, int, int]],
                                                            rates: tuple[float, float]) -> None:
    fleet = make_fleet("predicted", len(lengths))
    keys = tuple(range(1, 91))
    for replica, held in zip(fleet.replicas, lengths, strict=True):
        start = 0
        for medium, count in zip((GPU, CPU, STORAGE), held, strict=True):
            fleet.prefix_index.store(replica.index, medium, keys[start:start + count])
            start += count
        replica.update(ReplicaReport(TOKEN, {CPU: rates[0], STORAGE: rates[1]}))
    chosen = fleet.decide(Prompt(91 * BLOCK, {"space": Keys(keys, BLOCK)}), 0.0)
    assert chosen is not None
    whole = BLOCK * TOKEN

    def soonest(held: tuple[int, int, int]) -> float:
        return (91 - sum(held)) * whole + held[1] * min(rates[0], whole) + held[2] * min(rates[1], whole)

    best = min(soonest(held) for held in lengths)
    assert chosen.prediction.first_token == pytest.approx(soonest(lengths[chosen.replica.index]))
    assert chosen.prediction.first_token <= max(best * 1.05, best + 0.001) + 1e-9


@given(chats=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=60), most=st.integers(4, 80))
@settings(max_examples=40, deadline=None)
def test_what_could_be_found_again_is_counted_over_the_latest_prompts(chats: list[tuple[int, int]], most: int) -> None:
    """The count is that of an unlimited cache for few prompts, and later of the latest ones; new blocks never count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "MOST_SEEN", most)
        fleet, seen, best, latest = make_fleet("predicted", 2), set[int](), 0, 0
        history: list[tuple[int, ...]] = []
        for chat, length in chats:
            keys = tuple(chat * 100 + place for place in range(length))
            decision = fleet.decide(prompt := Prompt(length * BLOCK + 1, {"space": Keys(keys, BLOCK)}), 0.0)
            assert decision is not None
            recent: set[int] = set()
            for one in reversed(history):  # certainly within the two generations, which hold this many different blocks
                recent |= set(one)
                if len(recent) > most:
                    recent -= set(one)
                    break
            latest += sum(key in recent for key in keys) * BLOCK
            best += sum(key in seen for key in keys) * BLOCK
            fleet.count(prompt, decision)
            seen.update(keys)
            history.append(keys)
            assert latest <= fleet.reusable_tokens <= best


def test_a_slower_replica_gets_less_and_a_little_slower_one_does_not_starve() -> None:
    names = itertools.count(1)
    arrivals = [Arrival(place * 0.02, tuple(next(names) for _ in range(40))) for place in range(300)]
    alike = simulate("predicted", arrivals, token_seconds=[1e-4, 1.1e-4, 1e-4, 0.95e-4]).served
    apart = simulate("predicted", arrivals, token_seconds=[1e-4, 8e-4, 1e-4, 1e-4]).served
    assert min(alike) >= 60
    assert apart[1] < min(apart[0], apart[2], apart[3]) / 2
