"""Decides in each step whether to draft, for which requests and how much: the fastest by measured cost and acceptance.

Drafting needs a request's newest token, so a step with drafts cannot be prepared while the previous step runs: that
loss is part of the cost. If drafting does not pay off, requests decode as usual, and some drafts are made only for
statistics (probes): they are compared with the tokens that are sampled later, for at most PROBE_SHARE of the time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from spillover.engine.output.outputs import NO_DRAFTS, DraftCounts
from spillover.engine.speculation.acceptance import Acceptance
from spillover.engine.speculation.costs import Numbers, StepCosts, best_count, best_drafts
from spillover.engine.speculation.drafters.drafter import NOTHING, Draft, Drafter, PrefixCachingDrafter
from spillover.engine.speculation.expert_price import ExpertPrice, PricedCosts
from spillover.engine.step import Phase, Step

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

BEGIN_GAIN = 1.05  # expected speed relative to plain decoding at which steps start to wait for tokens, to draft
STAY_GAIN = 1.01  # expected speed relative to plain decoding below which they stop waiting
RECHECK_STEPS = 4  # steps between two such decisions
TRIAL_STEPS = 512  # steps without waiting after which a trial may start, as costs may have changed
TRIAL_LENGTH = 2  # steps of a trial
FIRST_TRIAL = 64  # steps before the first trial
TRIAL_TOKENS = 0.15  # fewest expected accepted tokens per draft for which a trial is worth it
PROBE_SHARE = 0.01  # maximum share of the time for probes, which are drafts that are not verified, and for trials
SHADOW_TOKENS = 3  # number of leading tokens of a probe that must be right before it is counted as right so far
MOST_CREDIT = 0.01  # maximum seconds saved up for probes and trials
MAX_PROBED = 32  # maximum number of requests per call of `probe`
MOST_ROWS = 1 << 20  # assumed maximum of a step's rows while it is not known
LONGEST_GAP = 0.05  # maximum seconds between two steps; a longer gap was a wait for something else


class Candidate(NamedTuple):
    request: Request
    most: int  # maximum number of tokens that may be drafted for it


@dataclass(frozen=True)
class SpeculationStats:
    """Counters of speculation since the start."""

    counts: DraftCounts = NO_DRAFTS
    steps: int = 0  # number of steps that verified drafts
    draft_seconds: float = 0.0  # seconds that drafting took, including probes
    simulated: bool = False  # whether acceptance is simulated
    proposed: int = 0  # tokens that drafters proposed, including probes and tokens dropped before verification
    verify_seconds: float = 0.0  # total seconds of the steps that verified drafts
    branches: int = 0  # number of branches of drafts that were verified
    branches_accepted: int = 0  # number of these that replaced the rest of their draft


class Speculator(Protocol):
    """The interface of speculation for the scheduler. All methods are called on the engine thread."""

    def waits(self, running: Sequence[Request]) -> bool:
        """Return whether the next step must wait for the tokens of the running one."""
        ...

    def drafts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[tuple[int, ...]]:
        """Return a draft for each candidate, () for none, of at most `room` tokens in total. `rows`: the rows of the
        step without drafts, of which `decodes` are decodes."""
        ...

    def launched(self, step: Step) -> None: ...

    def observe_step(self, step: Step, seconds: float) -> None: ...

    def verified(self, request: Request, drafted: int, accepted: int) -> None: ...

    def probe(self, running: Sequence[Request]) -> None:
        """Use the time while a step runs to learn about acceptance and costs."""
        ...

    def end(self, request: Request) -> None: ...

    def reset_prefix_cache(self) -> None:
        """Drop the KV of prefixes, if the drafter keeps any."""
        ...

    def stats(self) -> SpeculationStats | None: ...

    @property
    def most_tokens(self) -> int:
        """Return the maximum number of tokens of a draft; 0 if nothing is ever drafted."""
        ...


class NoSpeculation:
    most_tokens = 0

    def waits(self, running: Sequence[Request]) -> bool:
        return False

    def drafts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[tuple[int, ...]]:
        return [()] * len(candidates)

    def launched(self, step: Step) -> None:
        pass

    def observe_step(self, step: Step, seconds: float) -> None:
        pass

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def probe(self, running: Sequence[Request]) -> None:
        pass

    def end(self, request: Request) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def stats(self) -> SpeculationStats | None:
        return None


@dataclass(slots=True)
class _State:
    """The state of one request."""

    slot: int
    draft: Draft = NOTHING  # the draft that is being verified
    cut: bool = False  # whether the drafter proposed more tokens than `draft`, or might have without its limit
    shadow: Draft | None = None  # a probe, to be compared with the tokens that the request gets
    shadow_start: int = 0  # index of the token that the first token of `shadow` is compared with


class InFlightDrafts(NamedTuple):
    """Drafts that were still being computed when the step that verifies them was launched."""

    passes: Sequence[int]  # number of passes for each request
    seconds: Callable[[], float]  # returns the seconds of the drafts, once the step has completed


@dataclass(frozen=True)
class _Launched:
    gap: float  # seconds that the device was idle before the step
    waited: bool  # whether it was prepared only after the previous step had completed, so that it could have drafts
    trial: bool = False  # whether it drafted although that seemed not to pay off
    in_flight: InFlightDrafts | None = None  # drafts that the device was still computing when the step was launched


@dataclass
class _Clock:
    """The steps in flight, and the time at which the last one completed."""

    launched: deque[_Launched] = field(default_factory=deque)
    ended: float | None = None


class AdaptiveSpeculator:
    """Drafts if that is expected to be faster; with `adaptive=False` always."""

    hope = 0.0  # assumed share of right draft tokens before anything is known

    def __init__(self, drafter: Drafter, most_tokens: int, adaptive: bool = True, simulated: bool = False,
                 price: ExpertPrice | None = None) -> None:
        """Make the speculator. `price`: the price of experts that draft rows fetch, if experts are paged."""
        self.most_tokens = most_tokens
        self._price = price
        self._drafter = drafter
        self._adaptive = adaptive
        self._simulated = simulated
        self._acceptance = Acceptance(most_tokens, hope=self.hope)
        self._states: dict[Request, _State] = {}
        prompts = StepCosts()
        self._prompts = prompts  # costs of steps with prefill
        self._plain = StepCosts(prompts)
        self._speculating = StepCosts(self._plain) if price is None else PricedCosts(price, self._plain)
        self._clock = _Clock()
        self._waiting = not adaptive
        self._steps = 0
        self._since_tried = TRIAL_STEPS - FIRST_TRIAL  # steps since the last one that waited
        self._trial = 0  # remaining steps of a trial
        self._trial_rows = 0  # draft rows per step of a trial
        self._recheck = False  # whether a trial has just ended, so that the next step decides again
        self._prompt_rows = 0  # prompt rows of the last step
        self._most_rows: int | None = None  # maximum rows of a step, drafts included; None: not known yet
        self._turn = 0  # index of the request that was probed last
        self._credit = 0.0  # seconds saved up for probes and trials
        self._outcomes: Counter[tuple[int, int]] = Counter()  # drafts by tokens verified and tokens accepted
        self._verify_steps = 0
        self._draft_seconds = 0.0
        self._device_seconds = 0.0  # seconds of drafting that used the device since the last launch
        self._in_flight: InFlightDrafts | None = None  # drafts in flight on the device, to be verified by the next step
        self._proposed = 0
        self._verify_seconds = 0.0

    # Deciding

    def waits(self, running: Sequence[Request]) -> bool:
        if not any(request.pending for request in running):
            return False
        if self._adaptive and not self._trial and (self._recheck or self._steps % RECHECK_STEPS == 0):
            self._recheck = False
            self._waiting = self._pays_off(running)
        return self._waiting

    def _pays_off(self, running: Sequence[Request]) -> bool:
        """Return whether waiting for tokens, to draft, is expected to be faster than plain decoding."""
        decoding = [request for request in running if request.num_output > 0]
        prompt_rows = self._prompt_rows
        if not decoding:  # the next step will decode the requests whose first token the running step samples
            decoding, prompt_rows = [request for request in running if request.pending], 0
        survival, rows = self._survival(decoding), len(decoding) + prompt_rows
        least = STAY_GAIN if self._waiting else BEGIN_GAIN
        # First, a bound as if draft rows were free, which often decides in half the time. The cost of a plain step must
        # have been measured: extrapolated from prompt steps it would be too high.
        if (1 + survival.sum() / len(decoding) >= least and (prompt_rows or self._plain.covers(rows))
                and self._gain(survival, rows) >= least):
            return True
        return self._maybe_start_trial(survival)

    def _gain(self, survival: Numbers, rows: int) -> float:
        """Return the expected speed with drafts relative to plain decoding; 1 if nothing should be drafted."""
        chances = np.sort(survival.ravel())[::-1]
        count, gain = best_drafts(chances, len(survival), rows, self._speculating, self._plain, self._room(rows))
        return gain if count else 1.0

    def _room(self, rows: int) -> int:
        """Return how many draft rows fit into a step with `rows` other rows, by the limit seen in the last step."""
        return MOST_ROWS if self._most_rows is None else max(0, self._most_rows - rows)

    def _maybe_start_trial(self, survival: Numbers) -> bool:
        """Return whether to run a trial although drafting seems not to pay off: rarely, if it may accept tokens."""
        if self._since_tried >= TRIAL_STEPS and survival.sum() / len(survival) >= TRIAL_TOKENS:
            self._trial_rows = self._worth_trying(np.sort(survival.ravel())[::-1], len(survival))
            self._trial = TRIAL_LENGTH if self._trial_rows else 0
        return self._trial > 0

    def _worth_trying(self, chances: Numbers, decodes: int) -> int:
        """Return how many draft rows would pay off if their cost had halved every TRIAL_STEPS steps since the last
        trial; 0 if the trial might cost more than PROBE_SHARE of the time since then."""
        count, usual = min(len(chances), self._room(decodes)), self._plain.at(decodes)
        seconds = self._speculating.with_drafts(decodes, count) + self._speculating.price(chances[:count])
        hoped = usual + (seconds - usual) * 0.5 ** (self._since_tried / TRIAL_STEPS)
        best, _ = best_count(chances[:count], hoped, decodes, (usual, usual))
        allowed = PROBE_SHARE * min(self._since_tried, self._steps) * usual
        return best if TRIAL_LENGTH * (seconds[best] - usual) <= allowed else 0

    def drafts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[tuple[int, ...]]:
        self._most_rows = rows + room
        if not candidates or room < 1:
            return [()] * len(candidates)
        if not self._adaptive:
            return self._all(candidates, room)
        # Propose only for requests whose drafts are expected to be accepted: drafting takes time as well.
        counts = self._draft_counts(candidates, decodes, rows, room)
        chosen = [index for index, count in enumerate(counts) if count]
        some = [Candidate(candidates[index].request, counts[index]) for index in chosen]
        found = list(zip(some, self._propose(some), strict=True))
        kept = self._verify_counts(found, decodes, rows, room)
        drafts: list[tuple[int, ...]] = [()] * len(candidates)
        for index, (candidate, draft), count in zip(chosen, found, kept, strict=True):
            drafts[index] = self._begin(candidate, draft, count)
        return drafts

    def _all(self, candidates: Sequence[Candidate], room: int) -> list[tuple[int, ...]]:
        drafts = []
        for candidate, draft in zip(candidates, self._propose(candidates), strict=True):
            drafts.append(self._begin(candidate, draft, min(len(draft.tokens), room)))
            room -= len(drafts[-1])
        return drafts

    def _draft_counts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[int]:
        """Return how many tokens to draft for each candidate."""
        survival = self._survival_within_limits(candidates)
        most = [candidate.most for candidate in candidates]
        chances = survival.ravel()
        order = np.argsort(-chances, kind="stable")
        if self._trial:
            count = min(self._trial_rows, int(np.count_nonzero(chances)))
        else:
            count, gain = best_drafts(chances[order], decodes, rows, self._speculating, self._plain, room)
            if not count or gain < 1:
                self._maybe_start_trial(survival)
                return [0] * len(candidates)
        chosen = {int(place) // self.most_tokens for place in order[:count]}
        return [count if index in chosen else 0 for index, count in enumerate(most)]

    def _survival_within_limits(self, candidates: Sequence[Candidate]) -> Numbers:
        """Return the chance [candidates, most_tokens] that drafts are right up to each position; 0 beyond a candidate's
        maximum."""
        survival = self._survival([candidate.request for candidate in candidates])
        most = np.array([[candidate.most] for candidate in candidates])
        return np.where(np.arange(self.most_tokens) < most, survival, 0.0)

    def _verify_counts(self, found: Sequence[tuple[Candidate, Draft]], decodes: int, rows: int, room: int) -> list[int]:
        """Return how many tokens of each draft to verify."""
        drafted = sum(len(draft.tokens) for _, draft in found)
        if not drafted:
            return [0] * len(found)
        every = self._chances(found).ravel()
        order = np.argsort(-every, kind="stable")[:drafted]  # drops the positions after the drafts, which are 0
        if self._trial:
            count = min(drafted, self._trial_rows, room)
        else:
            count, gain = best_drafts(every[order], decodes, rows, self._speculating, self._plain, room)
            count = count if gain >= 1 else 0
        kept: list[int] = np.bincount(order[:count] // self.most_tokens, minlength=len(found)).tolist()
        return [min(count, len(draft.tokens)) for count, (_, draft) in zip(kept, found, strict=True)]

    def _begin(self, candidate: Candidate, draft: Draft, count: int) -> tuple[int, ...]:
        state = self._state(candidate.request)
        if not draft.tokens:
            self._note_no_draft(candidate.request, state.slot)
        state.cut = count < len(draft.tokens) or count == candidate.most
        if count < len(draft.tokens):
            draft = Draft(draft.tokens[:count], draft.confidence[:count], draft.alternatives[:count])
        state.draft = draft
        return draft.tokens

    def _note_no_draft(self, request: Request, slot: int) -> None:
        """Record that the drafter proposed nothing."""
        self._acceptance.note(slot, (), 0, cut=False)

    def _survival(self, requests: Sequence[Request]) -> Numbers:
        if self._drafter.expected is not None:
            return np.tile(np.array(self._drafter.expected[:self.most_tokens]), (len(requests), 1))
        return self._acceptance.survival([self._state(request).slot for request in requests])

    def _chances(self, found: Sequence[tuple[Candidate, Draft]]) -> Numbers:
        """Return the chance [drafts, most_tokens] that each draft is right up to each position; 0 after its end."""
        requests = [candidate.request for candidate, _ in found]
        if self._drafter.expected is None:
            slots = [self._state(request).slot for request in requests]
            return self._acceptance.chances(slots, [draft.confidence for _, draft in found])
        ends = np.array([[len(draft.tokens)] for _, draft in found])
        return np.where(np.arange(self.most_tokens) < ends, self._survival(requests), 0.0)

    def _propose(self, candidates: Sequence[Candidate]) -> list[Draft]:
        if not candidates:
            return []
        begun = time.perf_counter()
        found = self._drafter.propose([(candidate.request, candidate.most) for candidate in candidates])
        self._draft_seconds += time.perf_counter() - begun
        self._proposed += sum(len(draft.tokens) for draft in found)
        return found

    # Learning

    def launched(self, step: Step) -> None:
        now, clock = time.perf_counter(), self._clock
        idle = not clock.launched and clock.ended is not None
        gap = now - clock.ended - self._device_seconds if idle and clock.ended is not None else 0.0
        self._device_seconds = 0.0
        drafted = any(item.phase is Phase.VERIFY for item in step.items)
        waited = self._waiting or drafted
        clock.launched.append(_Launched(max(gap, 0.0) if gap <= LONGEST_GAP else 0.0, waited,
                                        waited and self._trial > 0, self._in_flight))
        self._in_flight = None
        self._prompt_rows = step.prefill_tokens
        self._steps += 1
        self._since_tried = 0 if waited else self._since_tried + 1
        if waited and self._trial:
            self._trial -= 1
            self._recheck = not self._trial
        self._verify_steps += drafted

    def observe_step(self, step: Step, seconds: float) -> None:
        clock = self._clock
        launched = clock.launched.popleft() if clock.launched else _Launched(0.0, False)
        clock.ended = time.perf_counter()
        self._credit = min(MOST_CREDIT, self._credit + PROBE_SHARE * seconds)
        total, gap = seconds + launched.gap, launched.gap
        if launched.in_flight is not None:  # drafting overlaps the gap first; its rest is part of the step's seconds
            drafting = launched.in_flight.seconds()
            self._draft_seconds += drafting
            gap, seconds = max(0.0, gap - drafting), seconds - max(0.0, drafting - gap)
        if any(item.phase is Phase.VERIFY for item in step.items):
            self._verify_seconds += seconds
        if self._price is not None:
            seconds -= self._price.observe(step, seconds, idle=not clock.launched)
        if step.has_prefill:
            self._prompts.note(step.num_tokens, seconds)
            return
        seconds += gap
        if launched.trial:
            self._note_trial_step(len(step.items), total)
        costs = self._speculating if launched.waited else self._plain
        costs.note(step.num_tokens, seconds)

    def _note_trial_step(self, decodes: int, seconds: float) -> None:
        """Record the seconds of a step of a trial."""

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        if self._price is not None:
            self._price.verified(accepted)
        state = self._state(request)
        # A draft was also cut if not all of it fit into the step.
        cut = state.cut or drafted < len(state.draft.tokens)
        self._acceptance.note(state.slot, state.draft.confidence[:drafted], accepted, cut)
        state.draft = NOTHING
        self._outcomes[drafted, accepted] += 1
        request.drafts = request.drafts.plus(drafted, accepted)

    def probe(self, running: Sequence[Request]) -> None:
        if not self._adaptive or self._drafter.expected is not None or self._drafter.sequential or not running:
            return
        for _ in range(min(MAX_PROBED, len(running))):
            if self._credit <= 0.0:
                return
            self._turn = (self._turn + 1) % len(running)
            request = running[self._turn]
            if request.num_output > 0:
                self._probe(request)

    def _probe(self, request: Request) -> None:
        """Compare a request's last probe with the tokens that it got, and make a new probe."""
        state, known = self._state(request), len(request.token_ids)
        if state.shadow is not None:
            guessed = state.shadow.tokens
            actual = request.token_ids[state.shadow_start:state.shadow_start + len(guessed)]
            right = 0
            while right < len(actual) and actual[right] == guessed[right]:
                right += 1
            if right == len(actual) < min(len(guessed), SHADOW_TOKENS):
                return  # too few tokens to decide yet
            if right == len(actual) < len(guessed):  # right so far; a new probe tells more than waiting for more tokens
                self._acceptance.note(state.slot, state.shadow.confidence[:right], right, cut=True)
            else:
                self._acceptance.note(state.slot, state.shadow.confidence, right, cut=False)
            state.shadow = None
        before = self._draft_seconds
        (draft,) = self._propose([Candidate(request, self.most_tokens)])
        self._credit -= self._draft_seconds - before
        if draft.tokens:
            state.shadow, state.shadow_start = draft, known
        else:
            self._acceptance.note(state.slot, (), 0, cut=False)

    def end(self, request: Request) -> None:
        state = self._states.pop(request, None)
        if state is not None:
            self._acceptance.remove(state.slot)
        if request.num_output > 0:
            self._drafter.end(request)
        if not self._states:
            self._clock.ended = None  # idle: the time until the next launch is not a gap between steps

    def reset_prefix_cache(self) -> None:
        if isinstance(self._drafter, PrefixCachingDrafter):
            self._drafter.reset_prefix_cache()

    def stats(self) -> SpeculationStats:
        counts = NO_DRAFTS
        for (drafted, accepted), times in list(self._outcomes.items()):
            counts = counts.plus(drafted, accepted, times)
        return SpeculationStats(counts, self._verify_steps, self._draft_seconds, self._simulated, self._proposed,
                                self._verify_seconds)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _State(self._acceptance.add())
        return state
