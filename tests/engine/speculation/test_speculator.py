"""Drafting is used where measured costs and acceptance predict that it is faster, and not elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.speculation import speculator as rules
from spillover.engine.speculation.acceptance import Acceptance
from spillover.engine.speculation.costs import StepCosts, best_drafts
from spillover.engine.speculation.drafters.drafter import Draft
from spillover.engine.speculation.speculator import AdaptiveSpeculator, Candidate
from spillover.engine.step import Phase, Step, StepItem


def costs(**seconds: float) -> StepCosts:
    made = StepCosts()
    for rows, cost in seconds.items():
        for _ in range(2):  # the first measurement may be ignored as an outlier
            made.note(int(rows[1:]), cost)
    return made


def test_costs_are_interpolated_never_fall_and_forget_outliers() -> None:
    made = costs(r1=1.0, r8=2.4)
    assert made.seconds(np.array([1.0, 4.5, 8.0, 20.0])) == pytest.approx([1.0, 1.7, 2.4, 2.4])
    for _ in range(3):
        made.note(1, 1.0)
    made.note(1, 300.0)  # as when a graph is captured
    assert made.seconds(np.array([1.0]))[0] == 1.0
    made.note(4, 0.2)  # newer than measurements with fewer rows, so these are lowered to it
    assert made.seconds(np.array([1.0, 4.0])) == pytest.approx([0.2, 0.2])
    assert (np.diff(made.seconds(np.arange(1.0, 20.0))) >= 0).all()
    above = StepCosts(made)
    above.note(8, 3.0)
    made.note(16, 3.4)
    assert above.seconds(np.array([16.0]))[0] == pytest.approx(3.0 + 1.0)


def test_few_rows_are_not_free_where_only_prompts_were_measured() -> None:
    prompts = StepCosts()
    decodes = StepCosts(prompts)
    drafts = StepCosts(decodes)
    decodes.note(1, 1.0)
    assert drafts.at(9) == 1.0  # no other measurement exists
    for _ in range(2):
        prompts.note(64, 8.0)
        prompts.note(128, 16.0)
    assert drafts.seconds(np.array([1.0, 10.0, 64.0, 96.0, 200.0])) == pytest.approx([1.0, 2.0, 8.0, 12.0, 16.0])
    drafts.note(4, 3.0)  # waiting costs more; the cost per row is unchanged
    assert drafts.seconds(np.array([4.0, 10.0, 64.0])) == pytest.approx([3.0, 3.0 + 6 / 9, 3.0 + 60 / 9])


def test_as_many_rows_as_pay() -> None:
    free = costs(r1=1.0, r9=1.0)
    dear = costs(r1=1.0, r9=9.0)
    chances = np.cumprod(np.full(8, 0.8))
    assert best_drafts(chances, 1, 1, free, free, 8) == (8, pytest.approx(1 + chances.sum()))
    assert best_drafts(chances, 1, 1, free, free, 3)[0] == 3
    assert best_drafts(chances, 1, 1, dear, dear, 8)[0] == 0
    slow = costs(r1=1.5, r9=2.3)  # 0.1 per row, plus half a step lost by waiting
    count, gain = best_drafts(chances, 1, 1, slow, free, 8)
    rates = [(1 + chances[:k].sum()) / (1.5 + 0.1 * k) for k in range(9)]
    assert count == int(np.argmax(rates))
    assert gain == pytest.approx(max(rates))
    assert best_drafts(chances, 1, 1, StepCosts(), StepCosts(), 8)[0] == 0


def test_acceptance_is_learned_by_position_and_falls_back_to_all() -> None:
    acceptance = Acceptance(4, slots=1)
    one = acceptance.add()
    for _ in range(60):
        acceptance.note(one, (1.0, 1.0, 1.0), 2, cut=False)
        acceptance.survival([one])  # applies the note
    new = acceptance.add()  # the first slot is in use, so the array grows
    assert new != one
    for slot in (one, new):
        chances = acceptance.survival([slot])[0]
        assert chances[1] > 0.8
        assert chances[2] < 0.1
    for _ in range(40):
        acceptance.note(new, (), 0, cut=False)
        acceptance.survival([new])
    assert acceptance.survival([new])[0][0] < 0.2
    assert acceptance.survival([one])[0][0] > 0.5
    before = acceptance.survival([one])[0][3]
    acceptance.note(one, (1.0, 1.0, 1.0), 3, cut=True)  # cut: the outcome of the rest is unknown
    assert acceptance.survival([one])[0][3] >= before
    acceptance.remove(new)
    assert acceptance.add() == new


def test_confidence_is_held_against_what_came() -> None:
    acceptance = Acceptance(2)
    slot = acceptance.add()
    rng = random.Random(0)
    for _ in range(300):
        sure = rng.choice([0.2, 0.8])
        acceptance.note(slot, (sure,), int(rng.random() < sure / 2), cut=True)  # twice as confident as justified
        acceptance.survival([slot])
    assert acceptance.chances([slot], [(0.8,)])[0, 0] == pytest.approx(0.4, abs=0.15)
    assert acceptance.chances([slot], [(0.2,)])[0, 0] == pytest.approx(0.1, abs=0.05)


class Chancy:
    """A drafter whose tokens are right with a given probability; the tokens to come are always 1, 2, 3 ..."""

    expected = None
    sequential = False

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.rng = random.Random(1)
        self.asked = 0

    def propose(self, requests: Sequence[tuple[Request, int]]) -> list[Draft]:
        self.asked += len(requests)
        return [self._draft(len(request.token_ids), most) for request, most in requests]

    def end(self, request: Request) -> None:
        pass

    def _draft(self, first: int, most: int) -> Draft:
        return Draft(tuple(first + i if self.rng.random() < self.chance else -1 for i in range(most)), (1.0,) * most)


def simulate(drafter: Chancy, requests: int, row_seconds: float, gap: float, steps: int,
             monkeypatch: pytest.MonkeyPatch, prompt: int = 0) -> tuple[float, AdaptiveSpeculator]:
    """Run a simulated engine; return its speed relative to no drafts. `prompt`: tokens of a step whose cost is known
    from the start."""
    now = [0.0]
    monkeypatch.setattr(rules.time, "perf_counter", lambda: now[0])
    speculator = AdaptiveSpeculator(drafter, 4)
    running = [Request(str(i), [0], SamplingParams(max_tokens=10**6)) for i in range(requests)]
    for request in running:
        request.token_ids.append(1)

    def cost(rows: int) -> float:
        return 0.01 + row_seconds * rows

    if prompt:
        speculator._prompts.note(prompt, cost(prompt))
    tokens = 0
    for _ in range(steps):
        for request in running:
            request.pending = 1
        waits = speculator.waits(running)
        for request in running:
            request.pending = 0
        drafts: list[tuple[int, ...]] = [()] * requests
        if waits:
            now[0] += gap
            drafts = speculator.drafts([Candidate(request, 4) for request in running], requests, requests, 10**6)
        items = tuple(StepItem(id=i, phase=Phase.VERIFY if draft else Phase.DECODE, start=0, count=1 + len(draft),
                               num_samples=1, first_block=0, new_blocks=(), draft=draft)
                      for i, draft in enumerate(drafts))
        step = Step(items)
        if not waits and speculator._clock.ended is not None:
            speculator._clock.ended = now[0]  # the step was launched before the previous one completed
        speculator.launched(step)
        seconds = cost(step.num_tokens)
        now[0] += seconds
        speculator.observe_step(step, seconds)
        speculator.probe(running)
        for request, draft in zip(running, drafts, strict=True):
            right = 0
            while right < len(draft) and draft[right] == len(request.token_ids) + right:
                right += 1
            if draft:
                speculator.verified(request, len(draft), right)
            request.token_ids.extend(range(len(request.token_ids), len(request.token_ids) + right + 1))
            tokens += right + 1
    return tokens / now[0] / (requests / cost(requests)), speculator


@pytest.mark.parametrize(("chance", "requests", "row_seconds", "gap", "least"), [
    (0.9, 1, 0.0001, 0.0005, 2.5),  # rows are nearly free
    (0.9, 24, 0.0001, 0.0005, 1.5),
    (0.9, 8, 0.01, 0.0005, 0.99),  # every row costs as much as a step
    (0.0, 4, 0.0001, 0.0005, 0.99),  # no draft is right
    (0.3, 4, 0.0001, 0.01, 0.97),  # waiting costs a step
    (0.1, 1, 0.001, 0.001, 0.97),
])
def test_what_pays_is_found_and_what_does_not_is_left(
        chance: float, requests: int, row_seconds: float, gap: float, least: float,
        monkeypatch: pytest.MonkeyPatch) -> None:
    speed, _ = simulate(Chancy(chance), requests, row_seconds, gap, 600, monkeypatch)
    assert speed >= least


@pytest.mark.parametrize("steps", [40, 100, 300, 1200])
@pytest.mark.parametrize("chance", [0.3, 0.5])
def test_a_prompt_tells_what_rows_cost_before_any_draft_was_verified(
        steps: int, chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is rarely right is given up: five rows cost 4.3 times one, which a prompt's step has shown."""
    speed, _ = simulate(Chancy(chance), 1, 0.05, 0.0005, steps, monkeypatch, prompt=60)
    assert speed >= 0.97


@pytest.mark.parametrize("steps", range(500, 1500, 200))
@pytest.mark.parametrize("requests", [1, 4])
def test_trials_lose_little(requests: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a drafter that is right a third of the time cost little even if each row costs as much as the first."""
    speed, _ = simulate(Chancy(0.33), requests, 0.05, 0.0005, steps, monkeypatch, prompt=60)
    assert speed >= 0.985


def test_what_seems_dear_is_tried_again_when_long_enough_has_passed() -> None:
    speculator, chances = AdaptiveSpeculator(Chancy(0.8), 4), np.array([0.8, 0.64, 0.5, 0.4])
    for _ in range(2):
        speculator._plain.note(1, 0.01)
        speculator._speculating.note(5, 0.4)
    for steps, tried in ((600, False), (20_000, True)):
        speculator._since_tried = speculator._steps = steps
        assert (speculator._worth_trying(chances, 1) > 0) == tried


def test_it_comes_back_when_drafts_become_right(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Chancy(0.0)
    _, speculator = simulate(drafter, 2, 0.0001, 0.0005, 600, monkeypatch)
    assert speculator.stats().counts.drafts < 30
    assert drafter.asked > 10, "drafts are made and compared, though not verified"


def test_a_step_that_compiled_does_not_count() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.note(1, 0.004)
    costs.note(5, 1.5)
    assert costs.at(5) == 0.004
    costs.note(5, 0.02)  # a second slow measurement is accepted
    assert costs.at(5) == 0.02
