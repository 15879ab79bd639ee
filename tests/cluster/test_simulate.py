"""Fleets in simulated time: invariants of every trace, and results known in closed form."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.policy import POLICIES
from spillover.cluster.simulate.arrivals import Arrival, BlockNames, reusable
from spillover.cluster.simulate.batching import ReplicaSettings, SimulatedReplica, SimulatedStep
from spillover.cluster.simulate.costs import StepCosts
from spillover.cluster.simulate.report import summary
from spillover.cluster.simulate.run import FleetSettings, Outcome, simulate

COSTS = StepCosts(0.01, 1e-4, 1e-8, 2e-4, 1e-6)
SIZE = 16


def trace(seed: int, count: int, rate: float = 20.0, groups: int = 4, shared: bool = True) -> list[Arrival]:
    """Return prompts with one of a few prefixes and a unique end, as a Poisson process."""
    draw, names, now, made = random.Random(seed), BlockNames(SIZE), 0.0, []
    for number in range(count):
        now += draw.expovariate(rate)
        parts = [(("group", draw.randrange(groups)), 16 * draw.randrange(1, 20))] if shared else []
        parts.append((("own", number), draw.randrange(1, 200)))
        made.append(Arrival(now, sum(length for _, length in parts), draw.randrange(1, 24), names.keys(parts)))
    return made


def play(arrivals: list[Arrival], fleet: FleetSettings) -> tuple[Outcome, list[tuple[SimulatedReplica, SimulatedStep]]]:
    """Simulate, and check every step against the limits of its replica."""
    steps: list[tuple[SimulatedReplica, SimulatedStep]] = []
    ends: dict[SimulatedReplica, float] = defaultdict(float)

    def check(replica: SimulatedReplica, step: SimulatedStep, now: float) -> None:
        limits = replica.settings
        assert 0 < sum(item.count for item in step.items) <= limits.max_num_batched_tokens
        assert len({item.sequence for item in step.items}) == len(step.items) <= limits.max_num_seqs
        assert len(replica.running) <= limits.max_num_seqs
        assert now - step.seconds >= ends[replica] - 1e-9, "steps of a replica follow each other"
        ends[replica] = now
        replica.cache.check()
        steps.append((replica, step))

    return simulate(arrivals, fleet, COSTS, check), steps


FLEETS = st.builds(
    FleetSettings, replicas=st.integers(1, 3), decode_replicas=st.integers(0, 2),
    policy=st.sampled_from(sorted(POLICIES)), kv_events=st.booleans(), request_seconds=st.sampled_from([0.0, 0.002]),
    transfer_token_seconds=st.sampled_from([0.0, 1e-5]), replica=st.builds(
        ReplicaSettings, max_num_seqs=st.integers(1, 12), max_num_batched_tokens=st.sampled_from([16, 64, 512]),
        num_blocks=st.sampled_from([45, 80, 4000]), host_blocks=st.sampled_from([0, 20, 400]),
        host_block_seconds=st.sampled_from([1e-4, 1.0]), overlap=st.booleans()))


@given(seed=st.integers(0, 10**6), fleet=FLEETS)
@settings(max_examples=40, deadline=None)
def test_tokens_are_conserved_and_limits_kept(seed: int, fleet: FleetSettings) -> None:
    arrivals = trace(seed, 40)
    outcome, steps = play(arrivals, fleet)
    fits = [each for each in arrivals if -(-(each.tokens + each.output_tokens) // SIZE) <= fleet.replica.num_blocks]
    assert outcome.refused == len(arrivals) - len(fits)
    assert outcome.prompt_tokens == sum(each.tokens for each in fits)
    assert outcome.output_tokens == sum(each.output_tokens for each in fits)
    assert len(outcome.gaps) == sum(each.output_tokens - 1 for each in fits)
    assert all(gap >= 0 for gap in outcome.gaps)
    assert sum(outcome.served) == len(fits)
    assert outcome.device_tokens + outcome.host_tokens <= outcome.prompt_tokens - len(fits)
    for place, arrival in enumerate(arrivals):
        assert math.isnan(outcome.first_token[place]) == math.isnan(outcome.finished[place])
        if not math.isnan(outcome.first_token[place]):
            assert 0 < outcome.first_token[place] <= outcome.finished[place] - arrival.at + 1e-9
    # All tokens not found are computed, and all output tokens but the last; more only if a request was preempted.
    found = outcome.device_tokens + outcome.host_tokens
    least = outcome.prompt_tokens - found + outcome.output_tokens - len(fits)
    computed = sum(item.count for _, step in steps for item in step.items)
    if outcome.preemptions:
        assert computed >= least - found
    else:
        assert computed == least


@given(seed=st.integers(0, 10**6), policy=st.sampled_from(sorted(POLICIES)))
@settings(max_examples=10, deadline=None)
def test_the_same_input_gives_the_same_output(seed: int, policy: str) -> None:
    fleet = FleetSettings(2, policy=policy, replica=ReplicaSettings(8, 256, SIZE, 120, 50, 1e-4))
    first, second = (summary(simulate(trace(seed, 40), fleet, COSTS), 1.0) for _ in range(2))
    assert first == second


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_one_endless_cache_finds_what_can_be_found(seed: int) -> None:
    arrivals = [replace(each, at=10.0 * place) for place, each in enumerate(trace(seed, 40))]  # one after another
    outcome, _ = play(arrivals, FleetSettings(1, replica=ReplicaSettings()))
    assert outcome.device_tokens / outcome.prompt_tokens == pytest.approx(reusable(arrivals, SIZE))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_what_a_small_device_lost_is_found_in_host_memory(seed: int) -> None:
    arrivals = [replace(each, at=10.0 * place) for place, each in enumerate(trace(seed, 40))]
    outcome, _ = play(arrivals, FleetSettings(1, replica=ReplicaSettings(
        num_blocks=50, host_blocks=1 << 30, host_block_seconds=1e-5)))
    found = outcome.device_tokens + outcome.host_tokens
    assert outcome.host_tokens
    assert found / outcome.prompt_tokens == pytest.approx(reusable(arrivals, SIZE))


@given(seed=st.integers(0, 10**6), blocks=st.sampled_from([60, 200, 1000]), host=st.sampled_from([0, 300]))
@settings(max_examples=8, deadline=None)
def test_no_fleet_finds_more_than_an_endless_cache(seed: int, blocks: int, host: int) -> None:
    arrivals = trace(seed, 60)
    for policy in POLICIES:
        outcome, _ = play(arrivals, FleetSettings(2, policy=policy, replica=ReplicaSettings(
            num_blocks=blocks, host_blocks=host, host_block_seconds=1e-5)))
        assert summary(outcome)["hit_rate"] <= reusable(arrivals, SIZE) + 1e-9


@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["predicted", "least-load", "round-robin"]))
@settings(max_examples=10, deadline=None)
def test_more_replicas_never_lower_throughput_without_reuse(seed: int, policy: str) -> None:
    arrivals = trace(seed, 50, rate=60.0, shared=False)
    rates = []
    for replicas in (1, 2, 4, 8):
        fleet = FleetSettings(replicas, policy=policy, replica=ReplicaSettings(8, 256))
        rates.append(summary(simulate(arrivals, fleet, COSTS))["requests_per_second"])
    assert all(after >= before * 0.98 for before, after in itertools.pairwise(rates)), rates


@given(prompt=st.integers(1, 2000), output=st.integers(1, 50), budget=st.sampled_from([64, 500, 4096]),
       overlap=st.booleans(), outside=st.sampled_from([0.0, 0.003]))
@settings(max_examples=40, deadline=None)
def test_one_request_alone_takes_what_its_steps_take(prompt: int, output: int, budget: int, overlap: bool,
                                                     outside: float) -> None:
    outcome, _ = play([Arrival(5.0, prompt, output)], FleetSettings(
        1, request_seconds=outside, replica=ReplicaSettings(max_num_batched_tokens=budget, overlap=overlap)))
    first = outside
    for start in range(0, prompt, budget):
        count = min(budget, prompt - start)
        if count == 1 and start + count == prompt:  # the engine counts it as a decode, too
            first += COSTS.step + COSTS.decode_row + COSTS.context_token * prompt
        else:
            first += COSTS.step + COSTS.prefill_token * count + COSTS.prefill_pair * count * (start + count / 2)
    rest = [COSTS.step + COSTS.decode_row + COSTS.context_token * (prompt + number) for number in range(1, output)]
    assert outcome.first_token[0] == pytest.approx(first)
    assert outcome.finished[0] - 5.0 == pytest.approx(first + sum(rest))
    assert list(outcome.gaps) == pytest.approx(rest)


def test_a_split_keeps_prompts_away_from_decodes() -> None:
    """A long prompt delays decoding on the same replica only; in a split, its KV must be transferred first."""
    arrivals = [Arrival(0.0, 100, 200), Arrival(0.5, 3000, 2)]
    limits = ReplicaSettings(max_num_batched_tokens=4096)
    both = simulate(arrivals, FleetSettings(1, replica=limits), COSTS)
    split = simulate(arrivals, FleetSettings(1, 1, replica=limits, transfer_token_seconds=1e-5), COSTS)
    assert max(both.gaps) > 0.3
    assert sorted(split.gaps)[-2] < 0.02  # all but the one that waited for its KV
    assert split.finished[1] - arrivals[1].at - split.first_token[1] >= 3000 * 1e-5


def test_an_arrival_waits_for_the_step_after_the_next_with_overlap() -> None:
    """As in the engine, the next step is chosen when the previous one begins, so an arrival misses it."""
    arrivals = [Arrival(0.0, 160, 20), Arrival(0.001, 160, 1)]
    costs = StepCosts(0.1)
    waits = [simulate(arrivals, FleetSettings(1, replica=ReplicaSettings(overlap=overlap)), costs).first_token[1]
             for overlap in (True, False)]
    assert waits == pytest.approx([0.299, 0.199])


@given(parts=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=5), min_size=2,
                      max_size=5), size=st.sampled_from([1, 4, 16]))
@settings(max_examples=50, deadline=None)
def test_blocks_have_the_same_name_if_and_only_if_all_up_to_them_is_the_same(parts: list[list[tuple[int, int]]],
                                                                             size: int) -> None:
    names = BlockNames(size)
    texts = [[(part, place) for part, length in prompt for place in range(length)] for prompt in parts]
    keys = [names.keys(prompt) for prompt in parts]
    for text, mine in zip(texts, keys, strict=True):
        assert len(mine) == len(text) // size
        for other, its in zip(texts, keys, strict=True):
            for block in range(min(len(mine), len(its))):
                end = (block + 1) * size
                assert (mine[block] == its[block]) == (text[:end] == other[:end])
