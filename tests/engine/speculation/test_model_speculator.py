"""With a draft model, draft lengths are those that measured costs and acceptance predict to be fastest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.speculation import model_speculator, speculator
from spillover.engine.speculation.costs import StepCosts
from spillover.engine.speculation.draft_costs import DraftCosts, best_counts
from spillover.engine.speculation.drafters.drafter import Draft
from spillover.engine.speculation.model_speculator import ModelSpeculator
from spillover.engine.speculation.speculator import Candidate
from spillover.engine.step import Phase, Step, StepItem

MOST = 6
UNIT = 0.01  # seconds of a plain step with one row


@dataclass(frozen=True)
class Costs:
    """Costs of a simulated engine, in units of a plain step with one row."""

    row: float  # of a step, per additional row
    wait: float  # until the newest tokens are available
    call: float  # of a draft of any length
    draft_pass: float
    draft_row: float

    def step(self, rows: int) -> float:
        return UNIT * (1 + self.row * (rows - 1))

    def draft(self, counts: Sequence[int]) -> float:
        passes = [sum(count > index for count in counts) for index in range(max(counts, default=0))]
        if not passes:
            return 0.0
        return UNIT * (self.call + sum(self.draft_pass + self.draft_row * served for served in passes))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Chancy:
    """A draft model with a probability per request of being right; the tokens to come are always 1, 2, 3 ..."""

    expected = None
    sequential = True

    def __init__(self, costs: Costs, chances: dict[Request, float], clock: Clock, rng: random.Random,
                 cold: float = 1.0, ahead: bool = False) -> None:
        """`cold`: cost factor of the first call; `ahead`: only the next step waits for drafts."""
        self.costs, self.chances, self.clock, self.rng, self.cold = costs, chances, clock, rng, cold
        self.ahead, self.left = ahead, 0.0
        self.running: Callable[[], float] | None = None

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        seconds = self.cold * self.costs.draft([most for _, most in requests])
        if self.ahead:
            self.left, self.running = seconds, lambda: seconds
        else:
            self.clock.now += seconds
        self.cold = 1.0
        return [self._draft(len(request.token_ids), most, self.chances[request]) for request, most in requests]

    def end(self, request: Request) -> None:
        pass

    def _draft(self, first: int, most: int, chance: float) -> Draft:
        return Draft(tuple(first + i if self.rng.random() < chance else -1 for i in range(most)), (1.0,) * most)


def run(costs: Costs, chances: Sequence[float], steps: int, fixed: int | None, seed: int, cold: float = 1.0,
        ahead: bool = False) -> float:
    """Return tokens per unit of time; `fixed`: the length of all drafts, None if it is adaptive."""
    clock, rng = Clock(), random.Random(seed)
    running = [Request(str(i), [0], SamplingParams(max_tokens=10**6)) for i in range(len(chances))]
    for request in running:
        request.token_ids.append(1)
    drafter = Chancy(costs, dict(zip(running, chances, strict=True)), clock, rng, cold, ahead)
    chooser = ModelSpeculator(drafter, MOST if fixed is None else fixed, adaptive=fixed is None)
    tokens = 0
    with pytest.MonkeyPatch.context() as patch:
        for module in (speculator, model_speculator):
            patch.setattr(module, "time", clock)
        for _ in range(steps):
            for request in running:
                request.pending = 1
            waits = chooser.waits(running)
            for request in running:
                request.pending = 0
            drafts: list[tuple[int, ...]] = [()] * len(running)
            if waits:
                clock.now += UNIT * costs.wait
                drafts = chooser.drafts([Candidate(request, chooser.most_tokens) for request in running],
                                        len(running), len(running), 10**6)
            elif chooser._clock.ended is not None:
                chooser._clock.ended = clock.now  # the step was launched before the previous one completed
            step = Step(tuple(StepItem(id=i, phase=Phase.VERIFY if draft else Phase.DECODE, start=0,
                                       count=1 + len(draft), num_samples=1, first_block=0, new_blocks=(), draft=draft)
                              for i, draft in enumerate(drafts)))
            chooser.launched(step)
            seconds, drafter.left = costs.step(step.num_tokens) + drafter.left, 0.0
            clock.now += seconds
            chooser.observe_step(step, seconds)
            chooser.probe(running)
            for request, draft in zip(running, drafts, strict=True):
                first = len(request.token_ids)
                right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(
                    draft, itertools.count(first), strict=False))))
                if draft:
                    chooser.verified(request, len(draft), right)
                request.token_ids.extend(range(first, first + right + 1))
                tokens += right + 1
    return tokens / clock.now


def plain_rate(costs: Costs, requests: int) -> float:
    return requests / costs.step(requests)


cost_curves = st.builds(
    Costs, row=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]), wait=st.sampled_from([0.0, 0.1, 0.5]),
    call=st.sampled_from([0.0, 0.05, 0.4]), draft_pass=st.sampled_from([0.01, 0.05, 0.2, 0.6, 1.0]),
    draft_row=st.sampled_from([0.0, 0.01, 0.1]))
acceptances = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.9, 0.97]), min_size=1, max_size=10)


@settings(max_examples=7, deadline=None, phases=[Stage.explicit, Stage.generate])
@given(cost_curves, acceptances, st.integers(0, 1000), st.booleans())
def test_it_is_never_slower_than_plain_and_near_the_best_fixed_length(
        costs: Costs, chances: list[float], seed: int, ahead: bool) -> None:
    speed = run(costs, chances, 700, None, seed, ahead=ahead)
    assert speed >= 0.97 * plain_rate(costs, len(chances))
    best = max(run(costs, chances, 150, fixed, seed) for fixed in (1, 2, 4, MOST))
    assert speed >= 0.85 * best


def test_drafts_that_nobody_waits_for_cost_what_they_take() -> None:
    """The verifying step takes longer by the unfinished part of the drafting, which is not attributed to its rows."""
    costs = Costs(row=0.1, wait=0.1, call=0.05, draft_pass=0.2, draft_row=0.01)
    chances = [0.9, 0.5, 0.0]
    assert run(costs, chances, 400, None, 3, ahead=True) == pytest.approx(run(costs, chances, 400, None, 3), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(cost_curves, acceptances, st.integers(0, 30))
def test_the_choice_is_no_worse_than_any_uniform_length(costs: Costs, chances: list[float], room: int) -> None:
    """With known costs, neither plain decoding nor any uniform draft length is faster."""
    step_costs, drafting = StepCosts(), DraftCosts()
    for rows in range(1, 17):
        step_costs.note(rows, costs.step(rows))
    for served in range(1, 17):
        drafting.note([1] * served, costs.draft([1] * served))
        drafting.note([2] * served, costs.draft([2] * served))
    requests = len(chances)
    survival = np.cumprod(np.tile(np.array(chances)[:, None], MOST), axis=1)
    counts, gain = best_counts(survival, requests, requests, step_costs, step_costs, room, drafting)
    assert counts.sum() <= room

    def speed(lengths: Sequence[int]) -> float:
        tokens = requests + sum(float(survival[i, :count].sum()) for i, count in enumerate(lengths))
        return tokens / (step_costs.at(requests + sum(lengths)) + drafting.seconds(lengths))

    plain = speed([0] * requests)
    assert speed(counts.tolist()) / plain == pytest.approx(gain)
    for length in range(1, MOST + 1):
        if length * requests <= room:
            assert max(gain, 1.0) >= 0.999 * speed([length] * requests) / plain


def test_costs_of_passes_are_told_apart_from_those_of_a_call() -> None:
    drafting, costs = DraftCosts(), Costs(row=0, wait=0, call=3.0, draft_pass=1.0, draft_row=0.5)
    assert drafting.most_known == 0
    for counts in ([1, 1, 1, 1], [4, 4, 4, 4], [1], [3]):
        drafting.note(counts, costs.draft(counts))
    assert drafting.most_known == 2
    for counts in ([4] * 4, [2] * 4, [1], [5], [4, 4, 1, 1], [2, 1, 1]):
        assert drafting.seconds(counts) == pytest.approx(costs.draft(counts), rel=0.1)


def test_a_first_pass_grows_slower_with_the_others_though_no_draft_is_short() -> None:
    drafting, costs = DraftCosts(), Costs(row=0, wait=0, call=0.5, draft_pass=1.0, draft_row=0.0)
    for counts in ([1], [4], *([6],) * 7):
        drafting.note(counts, costs.draft(counts))
    for _ in range(7):  # other work takes half of the machine
        drafting.note([6], 2 * costs.draft([6]))
    for counts in ([1], [3], [6]):
        assert drafting.seconds(counts) == pytest.approx(2 * costs.draft(counts))


@pytest.mark.parametrize("chance", [0.8, 0.97])
def test_a_slow_first_call_does_not_decide_how_much_is_drafted(chance: float) -> None:
    """A slow first call, which touches new memory or compiles, is not taken for the cost of every first pass."""
    costs = Costs(row=0.08, wait=0.05, call=0.02, draft_pass=0.4, draft_row=0.0)
    assert run(costs, [chance], 300, None, 1, cold=8.0) >= 0.97 * run(costs, [chance], 300, None, 1)


class Behind(Chancy):
    """A draft model that must first catch up with many tokens, at a hundredth of a step each."""

    passes: Sequence[int] = ()
    caught_up = 0

    def __init__(self, clock: Clock, missing: dict[Request, int]) -> None:
        costs = Costs(row=0.0, wait=0.0, call=0.0, draft_pass=0.01, draft_row=0.0)
        super().__init__(costs, dict.fromkeys(missing, 1.0), clock, random.Random(0))
        self.behind = missing

    def missing(self, request: Request) -> int:
        return self.behind[request]

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        self.caught_up = sum(min(100, self.behind[request]) for request, _ in requests)
        self.clock.now += 0.01 * UNIT * self.caught_up
        ready = [(request, most) for request, most in requests if not self.behind[request]]
        drafts = dict(zip((request for request, _ in ready), super().propose(ready), strict=True))
        for request, _ in requests:
            self.behind[request] -= min(100, self.behind[request])
        found = [drafts.get(request, Draft()) for request, _ in requests]
        self.passes = [len(draft.tokens) for draft in found]
        return found


@pytest.mark.parametrize(("left", "missing", "worth"), [(1000, 1000, True), (20, 100_000, False), (20, 0, True)])
def test_a_prompt_is_caught_up_with_where_that_pays(left: int, missing: int, worth: bool,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (speculator, model_speculator):
        monkeypatch.setattr(module, "time", clock)
    request = Request("one", [0], SamplingParams(max_tokens=left))
    request.token_ids.append(1)
    drafter = Behind(clock, {request: missing})
    chooser = ModelSpeculator(drafter, 4)
    for rows in (1, 2, 5):
        chooser._plain.note(rows, UNIT)
    drafted = 0
    for _ in range(30):
        drafted += len(chooser.drafts([Candidate(request, 4)], 1, 1, 100)[0])
    assert (drafted > 0) == worth
    assert worth or missing - drafter.behind[request] <= 200, "little was computed in vain"
    assert worth or not chooser._pays_off([request]), "and nobody waits for it"


def test_a_choice_is_kept_until_it_is_decided_again_whether_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft lengths are recomputed only when the decision to draft is: the device waits for each computation."""
    choices = 0

    def counted(*given: Any) -> Any:
        nonlocal choices
        choices += 1
        return best_counts(*given)

    monkeypatch.setattr(model_speculator, "best_counts", counted)
    run(Costs(row=0.01, wait=0.1, call=0.05, draft_pass=0.05, draft_row=0.01), [0.9], 800, None, 1)
    again = 800 / speculator.RECHECK_STEPS  # decisions whether to draft; each is followed by one on the length
    assert choices <= model_speculator.UNSETTLED + 2 * again + 10


def test_drafts_that_come_to_nothing_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes whose tokens cannot be expressed in the target's vocabulary count as wrong."""
    clock = Clock()
    for module in (speculator, model_speculator):
        monkeypatch.setattr(module, "time", clock)
    request = Request("one", [0], SamplingParams(max_tokens=1000))
    request.token_ids.append(1)
    drafter = Behind(clock, {request: 0})
    chooser = ModelSpeculator(drafter, 4)
    for rows in (1, 2, 5):
        chooser._plain.note(rows, UNIT)
    propose, asked = drafter.propose, 0

    def silent(given: Sequence[tuple[Request, int]]) -> list[Draft]:
        nonlocal asked
        asked += len(given)
        propose(given)
        return [Draft()] * len(given)

    monkeypatch.setattr(drafter, "propose", silent)
    for _ in range(100):
        chooser.drafts([Candidate(request, 4)], 1, 1, 100)
        chooser.probe([request])
    assert 0 < asked < 60


def test_trials_where_nothing_is_right_stay_within_their_share() -> None:
    """Trials of a drafter as slow as the model, and never right, cost plain decoding about one percent."""
    costs = Costs(row=0.5, wait=0.5, call=1.0, draft_pass=1.0, draft_row=0.0)
    assert run(costs, [0.0], 2500, None, 1) >= 0.98 * plain_rate(costs, 1)


def test_a_trial_verifies_what_it_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (speculator, model_speculator):
        monkeypatch.setattr(module, "time", clock)
    request = Request("one", [0], SamplingParams(max_tokens=1000))
    request.token_ids.append(1)
    chooser = ModelSpeculator(Behind(clock, {request: 0}), 4)
    for _ in range(2):
        chooser._plain.note(1, UNIT)
        chooser._speculating.note(2, 100 * UNIT)
    candidates = [Candidate(request, 4)]
    assert chooser.drafts(candidates, 1, 1, 100) == [()], "it does not pay"
    chooser._credit = UNIT
    assert chooser._maybe_start_trial(np.full((1, 4), 0.5))
    assert chooser.drafts(candidates, 1, 1, 100)[0]
