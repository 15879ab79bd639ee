"""A simulated replica and the engine's own scheduler: the same requests at the same times give the same steps."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.simulate.arrivals import Arrival, BlockNames
from spillover.cluster.simulate.batching import ReplicaSettings, SimulatedReplica, SimulatedStep
from spillover.cluster.simulate.costs import StepCosts, StepLoad
from spillover.cluster.simulate.run import FleetSettings, simulate
from spillover.engine.loop import Engine
from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.scheduler import Scheduler
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.engine.step import Phase, Step
from spillover.memory.connector import NullConnector
from spillover.memory.kv.kv_cache import KVCache
from support.simulated import VOCAB, SimulatedRunner

COSTS = StepCosts(0.01, 1e-4, 1e-7, 3e-4, 1e-6)


class Asked(NamedTuple):
    at: float
    prompt: list[int]
    output_tokens: int


Items = list[tuple[int, int, int]]  # (request, number of tokens computed, end position)


def requests(seed: int, count: int, rate: float) -> list[Asked]:
    """Return prompts with shared prefixes that end with a unique number."""
    draw, now, made = random.Random(seed), 0.0, []
    shared = [draw.randrange(VOCAB) for _ in range(80)]
    for number in range(count):
        now += draw.expovariate(rate)
        own = [draw.randrange(VOCAB) for _ in range(draw.randrange(60))]
        made.append(Asked(now, [*shared[:draw.randrange(80)], *own, *divmod(number, VOCAB)], draw.randrange(1, 30)))
    return made


def by_engine(asked: list[Asked], limits: ReplicaSettings) -> list[tuple[float, Items]]:
    """Return when each step completes, and its content, as the engine's loop runs them."""
    kv = KVCache(limits.num_blocks, limits.block_size, (None,))
    scheduler = Scheduler(SchedulerConfig(limits.max_num_seqs, limits.max_num_batched_tokens, 1 << 20), kv,
                          NullConnector())
    runner = SimulatedRunner(limits.block_size, (None,))
    engine = Engine(scheduler, runner, limits.overlap)
    names = {tuple(each.prompt): number for number, each in enumerate(asked)}
    ids: dict[int, int] = {}
    coming, made = list(enumerate(asked)), list[tuple[float, Items]]()
    now = end = 0.0
    running: float | None = None  # completion time of the launched step whose result is not applied yet
    while coming or engine.has_work:
        while coming and coming[0][1].at <= now:
            number, each = coming.pop(0)
            scheduler.add(Request(str(number), each.prompt, SamplingParams(max_tokens=each.output_tokens,
                                                                          temperature=0)))
        if not engine.has_work:
            now = coming[0][1].at
            continue
        before = len(runner.steps)
        engine.step()
        launched: float | None = None
        if len(runner.steps) > before:
            step = runner.steps[-1]
            ids.update((new.id, names[tuple(new.token_ids[:new.num_prompt])]) for new in step.new)
            end = launched = max(end, now) + COSTS.seconds(load(step))
            made.append((end, [(ids[item.id], item.count, item.end) for item in step.items]))
        taken, running = (running, launched) if limits.overlap else (launched, None)
        assert taken is not None or launched is not None or coming, "the engine stands still"
        now = taken if taken is not None else now if launched is not None else coming[0][1].at
    return made


def load(step: Step) -> StepLoad:
    prefills = [item for item in step.items if item.phase is Phase.PREFILL]
    decodes = [item for item in step.items if item.phase is not Phase.PREFILL]
    return StepLoad(sum(item.count for item in prefills), sum(item.count * (item.end - item.count / 2)
                                                              for item in prefills),
                    len(decodes), sum(item.end for item in decodes))


def by_simulator(asked: list[Asked], limits: ReplicaSettings) -> tuple[list[tuple[float, Items]], int]:
    names, made = BlockNames(limits.block_size), list[tuple[float, Items]]()
    # A token is a part: a sequence of equal tokens is a sequence of equal parts.
    arrivals = [Arrival(each.at, len(each.prompt), each.output_tokens, names.keys((token, 1) for token in each.prompt))
                for each in asked]

    def hear(replica: SimulatedReplica, step: SimulatedStep, now: float) -> None:
        made.append((now, [(item.sequence.number, item.count, item.end) for item in step.items]))

    outcome = simulate(arrivals, FleetSettings(1, replica=limits), COSTS, hear)
    assert not outcome.refused
    return made, outcome.preemptions


@given(seed=st.integers(0, 10**6), rate=st.sampled_from([5.0, 50.0, 500.0]), seqs=st.sampled_from([1, 3, 16]),
       budget=st.sampled_from([8, 40, 512]), blocks=st.sampled_from([24, 40, 4000]), size=st.sampled_from([8, 16]),
       overlap=st.booleans())
@settings(max_examples=30, deadline=None)
def test_steps_are_those_of_the_engine(seed: int, rate: float, seqs: int, budget: int, blocks: int, size: int,
                                       overlap: bool) -> None:
    asked = requests(seed, 25, rate)
    limits = ReplicaSettings(seqs, budget, size, blocks, overlap=overlap)
    simulated, _ = by_simulator(asked, limits)
    for mine, real in zip(simulated, by_engine(asked, limits), strict=True):
        assert mine[1] == real[1]
        assert abs(mine[0] - real[0]) < 1e-9


def test_so_they_are_where_requests_push_each_other_out() -> None:
    preempted = 0
    for seed in range(10):
        asked, limits = requests(seed, 25, 500.0), ReplicaSettings(16, 64, 8, 24 + seed)
        simulated, preemptions = by_simulator(asked, limits)
        assert [items for _, items in simulated] == [items for _, items in by_engine(asked, limits)]
        preempted += preemptions
    assert preempted > 10
