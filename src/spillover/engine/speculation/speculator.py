"""Decides in each step whether to draft, for whom and how much: what measured costs and acceptance say is fastest.

Drafting needs a request's newest token, so a step with drafts cannot be prepared while the one before it runs: that
loss is part of the cost. Where drafting does not pay, requests decode as usual, and drafts are made for nobody but the
statistics: they are held against the tokens that come anyhow, in at most PROBE_SHARE of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from spillover.engine.output.outputs import NO_DRAFTS, DraftCounts
from spillover.engine.speculation.acceptance import Acceptance
from spillover.engine.speculation.costs import Numbers, StepCosts, best_count, best_drafts
from spillover.engine.speculation.drafter import NOTHING, Draft, Drafter, KeepsPrefixes
from spillover.engine.speculation.expert_price import ExpertPrice, PricedCosts
from spillover.engine.step import Phase, Step

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

BEGIN_GAIN = 1.05  # expected speed over plain from which requests wait for their tokens to be drafted for
STAY_GAIN = 1.01  # and down to which they go on doing so
RECHECK_STEPS = 4  # between two such decisions
TRIAL_STEPS = 512  # after which waiting is tried again for TRIAL_LENGTH steps, as costs may have changed
TRIAL_LENGTH = 2
FIRST_TRIAL = 64  # steps before the first of them
TRIAL_TOKENS = 0.15  # expected of a draft and request at least for such a trial
PROBE_SHARE = 0.01  # of the time, for drafts that nobody verifies, and for trials
SHADOW_TOKENS = 3  # of such a draft that must be right for it to count as right so far
MOST_CREDIT = 0.01  # seconds of it that are saved up
LOOKED_AT = 32  # requests in one turn of probing
MOST_ROWS = 1 << 20  # where nothing is known of the most rows of a step
LONGEST_GAP = 0.05  # seconds between two steps; a longer one was a wait for something else


class Candidate(NamedTuple):
    request: Request
    most: int  # tokens that may be drafted for it


@dataclass(frozen=True)
class SpeculationStats:
    """What came of speculation so far."""

    counts: DraftCounts = NO_DRAFTS
    steps: int = 0  # that verified drafts
    draft_seconds: float = 0.0  # that drafters took, those of probes included
    simulated: bool = False  # acceptance is made up
    proposed: int = 0  # tokens that drafters offered: also those cut before they were verified, and those of probes
    verify_seconds: float = 0.0  # of steps that verified drafts, whole


class Speculator(Protocol):
    """What the scheduler asks. All of it is called in the engine's thread."""

    def waits(self, running: Sequence[Request]) -> bool:
        """Return whether the next step waits for the tokens of the one that runs."""
        ...

    def drafts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[tuple[int, ...]]:
        """Return a draft for each candidate, () for none, of `room` tokens in all, beside `rows` of which `decodes` are
        decodes."""
        ...

    def launched(self, step: Step) -> None: ...

    def observe_step(self, step: Step, seconds: float) -> None: ...

    def verified(self, request: Request, drafted: int, accepted: int) -> None: ...

    def probe(self, running: Sequence[Request]) -> None:
        """Learn something while a step runs."""
        ...

    def end(self, request: Request) -> None: ...

    def reset_prefix_cache(self) -> None:
        """Forget the KV of prefixes, where a drafter keeps any."""
        ...

    def stats(self) -> SpeculationStats | None: ...

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of a draft; 0: nothing is ever drafted."""
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
    """What is known of one request."""

    slot: int
    draft: Draft = NOTHING  # on its way to be verified, with what was offered beyond it ...
    cut: bool = False  # ... or would have been
    shadow: Draft | None = None  # made to be compared with what comes
    shadow_start: int = 0


class Ahead(NamedTuple):
    """Drafts that were still being made when the step that verifies them was launched."""

    passes: Sequence[int]  # of each request
    seconds: Callable[[], float]  # that they took, once the step has ended


@dataclass(frozen=True)
class _Launched:
    gap: float  # seconds that the device waited for it
    waited: bool  # it was prepared after the step before it had ended, for the sake of drafts
    trial: bool = False  # it drafted though that seemed not to pay
    ahead: Ahead | None = None


@dataclass
class _Clock:
    """Steps on their way, and when the last one ended."""

    launched: deque[_Launched] = field(default_factory=deque)
    ended: float | None = None


class AdaptiveSpeculator:
    """Drafts where that is expected to be faster; with `adaptive=False` always."""

    hope = 0.0  # how often drafts are taken to be right before anything is known of them

    def __init__(self, drafter: Drafter, most_tokens: int, adaptive: bool = True, simulated: bool = False,
                 price: ExpertPrice | None = None) -> None:
        """Speculate. `price`: of experts that draft rows bring to the device, where experts are paged."""
        self.most_tokens = most_tokens
        self._price = price
        self._drafter = drafter
        self._adaptive = adaptive
        self._simulated = simulated
        self._acceptance = Acceptance(most_tokens, hope=self.hope)
        self._states: dict[Request, _State] = {}
        prompts = StepCosts()
        self._prompts = prompts  # steps with prefill
        self._plain = StepCosts(prompts)
        self._speculating = StepCosts(self._plain) if price is None else PricedCosts(price, self._plain)
        self._clock = _Clock()
        self._waiting = not adaptive
        self._steps = 0
        self._since_tried = TRIAL_STEPS - FIRST_TRIAL  # steps since the last one that waited
        self._trial = 0  # steps that are left of a trial
        self._trial_rows = 0  # draft rows of each
        self._recheck = False  # a trial has ended: decide anew
        self._prompt_rows = 0  # of the last step
        self._most_rows: int | None = None  # of a step, drafts included; None: not known yet
        self._turn = 0  # whose turn it is to be probed
        self._credit = 0.0
        self._counts = NO_DRAFTS
        self._verify_steps = 0
        self._draft_seconds = 0.0
        self._device_seconds = 0.0  # of them, on the device and before the next step
        self._ahead: Ahead | None = None  # on the device too, and known when the next step has ended
        self._proposed = 0
        self._verify_seconds = 0.0

    # Deciding

    def waits(self, running: Sequence[Request]) -> bool:
        if not any(request.pending for request in running):
            return False
        if self._adaptive and not self._trial and (self._recheck or self._steps % RECHECK_STEPS == 0):
            self._recheck = False
            self._waiting = self._pays(running)
        return self._waiting

    def _pays(self, running: Sequence[Request]) -> bool:
        """Return whether waiting is expected to be faster than going on."""
        decoding = [request for request in running if request.num_output > 0]
        prompt_rows = self._prompt_rows
        if not decoding:  # those whose first tokens the step that runs will bring are all there is
            decoding, prompt_rows = [request for request in running if request.pending], 0
        survival, rows = self._survival(decoding), len(decoding) + prompt_rows
        least = STAY_GAIN if self._waiting else BEGIN_GAIN
        # Were rows free, this is what drafts would bring: mostly that tells enough, and in half the time. What a plain
        # step costs must have been measured: larger ones, of prompts, would make it seem slow.
        if (1 + survival.sum() / len(decoding) >= least and (prompt_rows or self._plain.covers(rows))
                and self._gain(survival, rows) >= least):
            return True
        return self._try_again(survival)

    def _gain(self, survival: Numbers, rows: int) -> float:
        """Return the speed over plain that is expected of drafting; 1 where nothing is to be drafted."""
        chances = np.sort(survival.ravel())[::-1]
        count, gain = best_drafts(chances, len(survival), rows, self._speculating, self._plain, self._room(rows))
        return gain if count else 1.0

    def _room(self, rows: int) -> int:
        """Return how many draft rows fit beside others, as far as a step has shown."""
        return MOST_ROWS if self._most_rows is None else max(0, self._most_rows - rows)

    def _try_again(self, survival: Numbers) -> bool:
        """Return whether to draft though it seems not to pay: once in a while, where something would be accepted."""
        if self._since_tried >= TRIAL_STEPS and survival.sum() / len(survival) >= TRIAL_TOKENS:
            self._trial_rows = self._worth_trying(np.sort(survival.ravel())[::-1], len(survival))
            self._trial = TRIAL_LENGTH if self._trial_rows else 0
        return self._trial > 0

    def _worth_trying(self, chances: Numbers, decodes: int) -> int:
        """Return how many draft rows would pay if rows had become cheaper: half as dear since the last trial, and again
        half as dear whenever as much time has passed; 0 where these may lose more than a share of what has run
        since."""
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
        # Ask for those only of whom something is expected: drafts take time as well.
        counts = self._asked(candidates, decodes, rows, room)
        asked = [index for index, count in enumerate(counts) if count]
        some = [Candidate(candidates[index].request, counts[index]) for index in asked]
        found = list(zip(some, self._propose(some), strict=True))
        kept = self._kept(found, decodes, rows, room)
        drafts: list[tuple[int, ...]] = [()] * len(candidates)
        for index, (candidate, draft), count in zip(asked, found, kept, strict=True):
            drafts[index] = self._begin(candidate, draft, count)
        return drafts

    def _all(self, candidates: Sequence[Candidate], room: int) -> list[tuple[int, ...]]:
        drafts = []
        for candidate, draft in zip(candidates, self._propose(candidates), strict=True):
            drafts.append(self._begin(candidate, draft, min(len(draft.tokens), room)))
            room -= len(drafts[-1])
        return drafts

    def _asked(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[int]:
        """Return how many tokens to draft for each candidate."""
        survival = self._possible(candidates)
        most = [candidate.most for candidate in candidates]
        chances = survival.ravel()
        order = np.argsort(-chances, kind="stable")
        if self._trial:
            count = min(self._trial_rows, int(np.count_nonzero(chances)))
        else:
            count, gain = best_drafts(chances[order], decodes, rows, self._speculating, self._plain, room)
            if not count or gain < 1:
                self._try_again(survival)
                return [0] * len(candidates)
        chosen = {int(place) // self.most_tokens for place in order[:count]}
        return [count if index in chosen else 0 for index, count in enumerate(most)]

    def _possible(self, candidates: Sequence[Candidate]) -> Numbers:
        """Return the chance [candidates, most_tokens] that drafts are right up to each position; 0 where none may
        be."""
        survival = self._survival([candidate.request for candidate in candidates])
        most = np.array([[candidate.most] for candidate in candidates])
        return np.where(np.arange(self.most_tokens) < most, survival, 0.0)

    def _kept(self, found: Sequence[tuple[Candidate, Draft]], decodes: int, rows: int, room: int) -> list[int]:
        """Return how many tokens of each draft to verify."""
        drafted = sum(len(draft.tokens) for _, draft in found)
        if not drafted:
            return [0] * len(found)
        every = self._chances(found).ravel()
        order = np.argsort(-every, kind="stable")[:drafted]  # behind the drafts there are zeros
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
            self._nothing(candidate.request, state.slot)
        state.draft = Draft(draft.tokens[:count], draft.confidence[:count])
        state.cut = count < len(draft.tokens) or count == candidate.most
        return state.draft.tokens

    def _nothing(self, request: Request, slot: int) -> None:
        """Note that the drafter had nothing to offer."""
        self._acceptance.note(slot, (), 0, cut=False)

    def _survival(self, requests: Sequence[Request]) -> Numbers:
        if self._drafter.expected is not None:
            return np.tile(np.array(self._drafter.expected[:self.most_tokens]), (len(requests), 1))
        return self._acceptance.survival([self._state(request).slot for request in requests])

    def _chances(self, found: Sequence[tuple[Candidate, Draft]]) -> Numbers:
        """Return the chance [drafts, most_tokens] that each is right up to each position; 0 behind its end."""
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
                                        waited and self._trial > 0, self._ahead))
        self._ahead = None
        self._prompt_rows = sum(item.count for item in step.items if item.phase is Phase.PREFILL)
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
        whole, gap = seconds + launched.gap, launched.gap
        if launched.ahead is not None:  # first beside the host, then as the first thing of the step
            drafting = launched.ahead.seconds()
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
            self._tried(len(step.items), whole)
        costs = self._speculating if launched.waited else self._plain
        costs.note(step.num_tokens, seconds)

    def _tried(self, decodes: int, seconds: float) -> None:
        """Note how long a step of a trial took."""

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        if self._price is not None:
            self._price.verified(accepted)
        state = self._state(request)
        # What did not fit of a draft was cut too.
        cut = state.cut or drafted < len(state.draft.tokens)
        self._acceptance.note(state.slot, state.draft.confidence[:drafted], accepted, cut)
        state.draft = NOTHING
        self._counts = self._counts.plus(drafted, accepted)
        request.drafts = request.drafts.plus(drafted, accepted)

    def probe(self, running: Sequence[Request]) -> None:
        if not self._adaptive or self._drafter.expected is not None or self._drafter.sequential or not running:
            return
        for _ in range(min(LOOKED_AT, len(running))):
            if self._credit <= 0.0:
                return
            self._turn = (self._turn + 1) % len(running)
            request = running[self._turn]
            if request.num_output > 0:
                self._probe(request)

    def _probe(self, request: Request) -> None:
        """Hold what was guessed for a request against what came, and guess again."""
        state, known = self._state(request), len(request.token_ids)
        if state.shadow is not None:
            guessed = state.shadow.tokens
            came = request.token_ids[state.shadow_start:state.shadow_start + len(guessed)]
            right = 0
            while right < len(came) and came[right] == guessed[right]:
                right += 1
            if right == len(came) < min(len(guessed), SHADOW_TOKENS):
                return  # nothing is decided yet
            if right == len(came) < len(guessed):  # right so far, and a new guess tells more than the rest of this one
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
            self._clock.ended = None  # what comes next is a new beginning, not a gap

    def reset_prefix_cache(self) -> None:
        if isinstance(self._drafter, KeepsPrefixes):
            self._drafter.reset_prefix_cache()

    def stats(self) -> SpeculationStats | None:
        return SpeculationStats(self._counts, self._verify_steps, self._draft_seconds, self._simulated, self._proposed,
                                self._verify_seconds)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _State(self._acceptance.add())
        return state
