"""With paged experts, draft rows are priced by the experts that they fetch: drafting stops where it does not pay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from spillover import LLM
from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.speculation import speculator as rules
from spillover.engine.speculation.drafters.drafter import Draft
from spillover.engine.speculation.expert_price import ExpertPrice
from spillover.engine.speculation.speculator import AdaptiveSpeculator, Candidate
from spillover.engine.step import Phase, Step, StepItem
from spillover.engine.weights.traffic import WeightTraffic
from spillover.memory.experts import ExpertCache
from spillover.memory.policies.experts.lru import LRUQuota
from spillover.memory.routing import Trace, uniform
from support import starved

LAYERS, EXPERTS, K, QUOTA = 4, 64, 4, 24
EXPERT_BYTES, LINK = 1_000_000, 5e9  # 0.2 ms per expert


@dataclass
class Machine:
    """A mixture with paged experts: a step takes a fixed time, a little per row, and the link's time per miss."""

    fixed: float
    row: float = 0.00002
    now: float = 0.0
    cache: ExpertCache = field(default_factory=lambda: ExpertCache(LAYERS, EXPERTS, QUOTA, LRUQuota()))

    def traffic(self) -> WeightTraffic:
        counts = self.cache.counts
        return WeightTraffic(EXPERT_BYTES * counts.misses, counts.misses, 0, counts.hits, counts.misses)

    def run(self, rows: Sequence[Sequence[Sequence[int]]]) -> float:
        """Return the seconds of a step and advance the clock. `rows`: the experts of each row, by layer."""
        before = self.cache.counts.misses
        self.cache.policy.on_phase("decode")
        for layer in range(LAYERS):
            wanted = list(dict.fromkeys(expert for row in rows for expert in row[layer]))
            self.cache.policy.on_route(int(self.now * 1e6), layer, wanted)
            for expert in wanted:
                if self.cache.lookup(layer, expert) is None:
                    self.cache.assign(layer, expert, keep=wanted)
        missed = self.cache.counts.misses - before
        seconds = self.fixed + self.row * len(rows) + missed * EXPERT_BYTES / LINK
        self.now += seconds
        return seconds


def sticky(steps: int, seed: int) -> Trace:
    """Return routing as in real text: most experts are those of the token before, and some experts are popular."""
    rng = np.random.default_rng(seed)
    popular = 1 / np.arange(1, EXPERTS + 1)
    shares = [rng.permutation(popular / popular.sum()) for _ in range(LAYERS)]
    trace = [[rng.choice(EXPERTS, K, replace=False, p=share).tolist() for share in shares]]
    for _ in range(steps - 1):
        step = []
        for layer, share in enumerate(shares):
            kept = [expert for expert in trace[-1][layer] if rng.random() < 0.8]
            while len(kept) < K:
                drawn = int(rng.choice(EXPERTS, p=share))
                if drawn not in kept:
                    kept.append(drawn)
            step.append(kept)
        trace.append(step)
    return trace


class Guessing:
    """Drafts the tokens that will follow (1, 2, 3 ...), each right with a given probability."""

    expected = None
    sequential = False

    def __init__(self, chance: float) -> None:
        self._chance, self._rng = chance, random.Random(2)

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [Draft(tuple(len(request.token_ids) + place if self._rng.random() < self._chance else -1
                            for place in range(most)), (1.0,) * most) for request, most in requests]

    def end(self, request: Request) -> None:
        pass


def generate(trace: Trace, strangers: Trace, chance: float, fixed: float, monkeypatch: pytest.MonkeyPatch,
             priced: bool = True) -> tuple[float, AdaptiveSpeculator]:
    """Generate a token for each step of a trace; return the speed relative to no drafts in the second half, when costs
    are known. A wrong draft token is routed like a step of `strangers`."""
    plain = Machine(fixed)
    passed = [plain.run([step]) for step in trace]
    machine, rng = Machine(fixed), random.Random(3)
    monkeypatch.setattr(rules.time, "perf_counter", lambda: machine.now)
    speculator = AdaptiveSpeculator(Guessing(chance), 4, price=ExpertPrice(machine.traffic, LINK) if priced else None)
    request = Request("r", [0], SamplingParams(max_tokens=10**6))
    request.token_ids.append(1)
    place, half = 0, 0.0
    while place < len(trace) - 5:
        request.pending = 1
        waits = speculator.waits([request])
        request.pending = 0
        draft: tuple[int, ...] = ()
        if waits:
            machine.now += 0.00005  # the device waits for the host
            (draft,) = speculator.drafts([Candidate(request, 4)], 1, 1, 100)
        right = 0
        while right < len(draft) and draft[right] == len(request.token_ids) + right:
            right += 1
        rows = [*trace[place:place + 1 + right], *(rng.choice(strangers) for _ in draft[right:])]
        step = Step((StepItem(id=0, phase=Phase.VERIFY if draft else Phase.DECODE, start=0, count=len(rows),
                              num_samples=1, first_block=0, new_blocks=(), draft=draft),))
        if not waits and speculator._clock.ended is not None:
            speculator._clock.ended = machine.now  # the step was launched before the previous one completed
        speculator.launched(step)
        speculator.observe_step(step, machine.run(rows))
        speculator.probe([request])
        if draft:
            speculator.verified(request, len(draft), right)
        request.token_ids.extend(range(len(request.token_ids), len(request.token_ids) + right + 1))
        before, place = place, place + right + 1
        if before < len(trace) // 2 <= place:
            half, begun = machine.now, place
    return sum(passed[begun:place]) / (machine.now - half), speculator


@pytest.mark.parametrize("chance", [0.2, 0.4, 0.6])
def test_uniform_routing_is_not_drafted_for(chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted: misses dominate a step, and an additional row causes as many misses as an additional step."""
    trace = uniform(1600, LAYERS, EXPERTS, K, seed=1)
    speed, speculator = generate(trace, uniform(200, LAYERS, EXPERTS, K, seed=2), chance, 0.0006, monkeypatch)
    assert speed >= 0.97
    stats = speculator.stats()
    assert stats is not None
    assert stats.counts.drafts < 0.01 * len(trace)
    assert stats.counts.tokens <= 2 * stats.counts.drafts, "where it is tried again, it is tried with few rows"


@pytest.mark.parametrize(("chance", "least"), [(0.1, 0.97), (0.6, 1.2), (0.9, 2.2)])
def test_routing_as_of_texts_is_drafted_for_where_drafts_are_right(chance: float, least: float,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    speed, _ = generate(sticky(1600, 1), sticky(400, 1)[::-1], chance, 0.003, monkeypatch)
    assert speed >= least
    blind, _ = generate(sticky(1600, 1), sticky(400, 1)[::-1], chance, 0.003, monkeypatch, priced=False)
    assert speed >= 0.98 * blind


def test_what_rows_fetch_is_told_apart_and_an_expert_costs_what_it_takes() -> None:
    rng = random.Random(5)
    counts = [0]
    price = ExpertPrice(lambda: WeightTraffic(EXPERT_BYTES * counts[0], counts[0], 0, 0, counts[0]), LINK / 3)

    def run(drafted: int, accepted: int) -> None:
        fetched = 2 + accepted + 6 * (drafted - accepted) + rng.choice([-1, 0, 1])
        counts[0] += fetched
        step = Step((StepItem(id=0, phase=Phase.VERIFY if drafted else Phase.DECODE, start=0, count=1 + drafted,
                              num_samples=1, first_block=0, new_blocks=(), draft=(1,) * drafted),))
        price.observe(step, 0.01 + fetched * EXPERT_BYTES / LINK, idle=True)
        if drafted:
            price.verified(accepted)

    for _ in range(400):
        drafted = rng.choice([0, 1, 2, 3])
        run(drafted, rng.randint(0, drafted))
    assert price.plain_experts == pytest.approx(2, abs=0.4)
    accepted, wasted = price.row_experts
    assert accepted == pytest.approx(1, abs=0.6)
    assert wasted == pytest.approx(6, abs=0.8)
    assert price.expert_seconds == pytest.approx(EXPERT_BYTES / LINK, rel=0.2)  # not three times that
    sums = price.cumulative(np.array([1.0, 0.5]))
    assert sums[0] == 0
    assert np.diff(sums) == pytest.approx(price.expert_seconds * np.array([accepted, (accepted + wasted) / 2]))


def test_nothing_is_learned_of_steps_that_ran_beside_others_or_of_prompts() -> None:
    counts, asked = [0], [0]

    def traffic() -> WeightTraffic:
        asked[0] += 1
        return WeightTraffic(0, 0, 0, 0, counts[0])

    price = ExpertPrice(traffic)

    def step(phase: Phase) -> Step:
        return Step((StepItem(id=0, phase=phase, start=0, count=8, num_samples=1, first_block=0, new_blocks=()),))

    for _ in range(9):
        counts[0] += 3
        assert price.observe(step(Phase.DECODE), 0.01, idle=False) == 0.0
    assert asked[0] == 1, "reading the counts waits for the device"
    counts[0] += 3
    price.observe(step(Phase.DECODE), 0.01, idle=True)
    assert price.plain_experts == 3
    counts[0] += 1000
    price.observe(step(Phase.PREFILL), 0.5, idle=True)
    assert price.plain_experts == 3


def test_plain_rows_are_priced_anew_where_routing_changes_while_steps_overlap() -> None:
    """The price follows when routing changes between requests: a prompt, overlapped decode steps, then a draft."""
    counts, reads = [0], [0]

    def traffic() -> WeightTraffic:
        reads[0] += 1
        return WeightTraffic(0, 0, 0, 0, counts[0])

    price = ExpertPrice(traffic)
    rng = random.Random(7)
    for experts in (80, 1, 30):
        for _ in range(3):
            for phase, count, misses in ((Phase.PREFILL, 1, 5000), (Phase.DECODE, rng.randint(40, 200), experts)):
                for _ in range(count):
                    counts[0] += misses
                    price.observe(step_of(phase), 0.01, idle=False)
            counts[0] += 2 * experts
            price.observe(step_of(Phase.VERIFY, drafted=1), 0.01, idle=True)
            price.verified(0)
        assert price.plain_experts == pytest.approx(experts, rel=0.2, abs=1)
    assert reads[0] == 1 + 2 * 9, "once behind each prompt, and once where nothing runs beside"


def step_of(phase: Phase, drafted: int = 0) -> Step:
    return Step((StepItem(id=0, phase=phase, start=0, count=1 + drafted, num_samples=1, first_block=0, new_blocks=(),
                          draft=(1,) * drafted),))


@pytest.mark.parametrize("strategy", ["experts", "host-experts", "demand"])
def test_a_paged_mixture_says_the_same_and_its_misses_are_seen(strategy: str, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, "qwen3-moe")
    whole = starved.answer(folder, starved.prompts(), tokens=30)
    budget = (starved.least(folder, weights=strategy) + whole.plan.weight_bytes + whole.plan.workspace_bytes) // 2
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(folder, gpu_memory=str(budget), max_model_len=160, max_num_seqs=4, max_num_batched_tokens=64,
             load_format="dummy", skip_tokenizer_init=True, weights=strategy, speculative_method="ngram",
             speculative_adaptive=False) as llm:
        found = llm.generate(starved.prompts(), params, use_tqdm=False)
        speculator = llm.engine.scheduler.speculator
        assert isinstance(speculator, AdaptiveSpeculator)
        price = speculator._price
    assert [list(one.outputs[0].token_ids) for one in found] == whole.tokens
    assert sum(one.drafts.accepted for one in found) > 0
    assert price is not None
    assert price.plain_experts > 0
