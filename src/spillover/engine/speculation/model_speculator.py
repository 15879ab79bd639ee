"""Decides how much to draft if a model drafts: each draft token costs a pass, so draft lengths are chosen beforehand.

Nothing is drafted only for statistics, as that would take device time: a drafter is assumed to be fairly good until it
was tried; if it does not pay off, it is tried again on running requests, for at most PROBE_SHARE of the time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from spillover.engine.output.outputs import DraftCounts
from spillover.engine.speculation.branches import (
    Chain,
    LinkStats,
    Place,
    Seconds,
    Seed,
    choose_branches,
    likely_places,
)
from spillover.engine.speculation.costs import Numbers, StepCosts
from spillover.engine.speculation.draft_costs import DraftCosts, best_counts
from spillover.engine.speculation.drafters.drafter import Draft, Drafter
from spillover.engine.speculation.expert_price import ExpertPrice
from spillover.engine.speculation.speculator import (
    MOST_CREDIT,
    AdaptiveSpeculator,
    Candidate,
    InFlightDrafts,
    SpeculationStats,
)
from spillover.engine.step import Step

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

HOPE = 0.6  # assumed share of accepted draft tokens before any was tried
UNSETTLED = 64  # number of choices after which they are kept; until then every step chooses again, to learn costs
SHORT_DRAFTS = 4  # number of initial drafts of one token; the first is not measured: it compiles and touches new memory
TRIAL_DRAFT = 4  # tokens per draft in a trial, which drafts although it seems not to pay off
TRIAL_REQUESTS = 8  # maximum number of requests that a trial drafts for
USUAL_OUTPUT = 128.0  # expected output tokens of a request before any request has finished
OUTPUT_WEIGHT = 0.1  # weight of the latest value in a moving average
MIN_REMAINING_OUTPUT = 16  # fewest further output tokens that are expected of any request
BRANCH_ROWS = 16  # rows of a short branch: half a block is computed again


@runtime_checkable
class CatchUpDrafter(Protocol):
    """A drafter that has to compute KV of a request before it can draft for it."""

    @property
    def passes(self) -> Sequence[int]:
        """Return the number of passes that the last call took for each request; 0 if the request is not ready yet."""
        ...

    @property
    def caught_up(self) -> int:
        """Return the number of tokens that the last call computed to make requests ready."""
        ...

    def missing(self, request: Request) -> int:
        """Return the number of tokens that are still to be computed."""
        ...


@runtime_checkable
class AsyncDrafter(Protocol):
    """A drafter that may return drafts while the device still computes them, for the next step to verify."""

    @property
    def running(self) -> Callable[[], float] | None:
        """Return a function that gives the last drafts' seconds after the next step; None: they have completed."""
        ...


@runtime_checkable
class BranchingDrafter(Protocol):
    """A drafter whose drafts may have branches."""

    wants_alternatives: bool  # whether the next drafts have `Draft.alternatives`

    def extend(self, seeds: Sequence[Seed]) -> list[tuple[int, ...]]:
        """Return the tokens that follow the first token of each branch."""
        ...


def make_speculator(drafter: Drafter, most_tokens: int, adaptive: bool = True, simulated: bool = False,
                    price: ExpertPrice | None = None, most_branches: int = 0) -> AdaptiveSpeculator:
    if not drafter.sequential:
        return AdaptiveSpeculator(drafter, most_tokens, adaptive, simulated, price)
    return ModelSpeculator(drafter, most_tokens, adaptive, simulated, price, most_branches)


class ModelSpeculator(AdaptiveSpeculator):
    hope = HOPE

    def __init__(self, drafter: Drafter, most_tokens: int, adaptive: bool = True, simulated: bool = False,
                 price: ExpertPrice | None = None, most_branches: int = 0) -> None:
        """Make the speculator. `most_branches`: maximum number of branches per draft, if the drafter supports them."""
        super().__init__(drafter, most_tokens, adaptive, simulated, price)
        self._catch_up_drafter = drafter if isinstance(drafter, CatchUpDrafter) else None
        self._async_drafter = drafter if isinstance(drafter, AsyncDrafter) else None
        self._drafting = DraftCosts()
        self._choice: tuple[object, list[int]] | None = None  # (arguments of the choice, tokens to draft per candidate)
        self._num_choices = 0  # number of choices made, counted up to UNSETTLED
        self._measured: tuple[Sequence[int], float] | None = None  # passes and seconds that are not recorded yet
        self._drafted = 0  # number of calls that drafted, counted up to SHORT_DRAFTS
        self._ready: set[Request] = set()  # requests of the last call that drafts could be made for
        self._trial_token_seconds = 0.0  # seconds per token accepted in the last step if it was a trial, else 0
        self._token_seconds = 0.0  # seconds to compute a missing token; 0: not known
        self._usual_output = USUAL_OUTPUT
        self._skipped: dict[Request, int] = {}  # requests not worth catching up -> output tokens when that was decided
        self._brancher = drafter if isinstance(drafter, BranchingDrafter) and not simulated else None
        self.most_branches = most_branches if self._brancher is not None else 0
        self._links = LinkStats()
        self._branch_passes = StepCosts()  # seconds of a pass that extends branches, by their number
        self._chain_seconds = 0.0  # seconds that the last call of `drafts` took
        self._branches = self._branches_accepted = self._branch_tokens = 0

    def _gain(self, survival: Numbers, rows: int) -> float:
        return best_counts(survival, len(survival), rows, self._speculating, self._plain, self._room(rows),
                           self._drafting)[1]

    def _pays_off(self, running: Sequence[Request]) -> bool:
        self._choice = None
        return super()._pays_off(running)

    def _draft_counts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[int]:
        # The device waits for this choice, so it is kept until _pays_off decides again whether to draft at all.
        arguments = (tuple(candidates), decodes, rows, room)
        if self._choice is not None and self._choice[0] == arguments and not self._trial:
            return self._choice[1]
        self._choice = None
        if self._trial:
            counts = self._trial_counts(candidates, room)
        else:
            chosen, gain = best_counts(self._survival_within_limits(candidates), decodes, rows, self._speculating,
                                       self._plain, room, self._drafting)
            counts = chosen.tolist() if gain > 1 else [0] * len(candidates)
            self._skip_unprofitable(candidates, counts, gain, decodes)
        if self._drafted < SHORT_DRAFTS or self._drafting.most_known < 2:
            # While costs are not measured, drafts are short.
            limit = (1, TRIAL_DRAFT)[self._drafting.most_known] if self._drafted == SHORT_DRAFTS else 1
            return [min(count, limit) for count in counts]
        if not self._trial and self._catch_up_drafter is None:
            self._num_choices += self._num_choices < UNSETTLED
            self._choice = (arguments, counts) if self._num_choices == UNSETTLED else None
        return counts

    def _verify_counts(self, found: Sequence[tuple[Candidate, Draft]], decodes: int, rows: int, room: int) -> list[int]:
        """Keep whole drafts except in a trial: their lengths were chosen with the same knowledge as now."""
        if self._trial:
            return super()._verify_counts(found, decodes, rows, room)
        return [len(draft.tokens) for _, draft in found]

    def _skip_unprofitable(self, candidates: Sequence[Candidate], counts: list[int], gain: float, decodes: int) -> None:
        """Set counts to 0 for requests whose missing tokens cost more time than drafts are expected to save."""
        if self._catch_up_drafter is None or not self._token_seconds:
            return
        saved = self._plain.at(decodes) / decodes * (1 - 1 / gain)  # seconds saved per output token
        for index, candidate in enumerate(candidates):
            request = candidate.request
            missing = self._catch_up_drafter.missing(request) * self._token_seconds if counts[index] else 0.0
            if missing > saved * self._remaining_output(request):
                self._skipped[request] = request.num_output
                counts[index] = 0

    def _remaining_output(self, request: Request) -> float:
        """Return the expected number of further output tokens: up to the usual output, or half of the output so far."""
        expected = max(self._usual_output - request.num_output, request.num_output / 2, MIN_REMAINING_OUTPUT)
        most = request.params.max_tokens
        return expected if most is None else min(expected, most - request.num_output)

    def _survival(self, requests: Sequence[Request]) -> Numbers:
        survival = super()._survival(requests)
        for index, request in enumerate(requests):
            before = self._skipped.get(request)
            if before is not None and request.num_output < 2 * before + MIN_REMAINING_OUTPUT:
                survival[index] = 0.0
        return survival

    def end(self, request: Request) -> None:
        self._choice = None  # the choice refers to the request
        self._skipped.pop(request, None)
        self._ready.discard(request)
        if request.num_output > 0:
            self._usual_output += OUTPUT_WEIGHT * (request.num_output - self._usual_output)
        super().end(request)

    def _trial_counts(self, candidates: Sequence[Candidate], room: int) -> list[int]:
        """Return draft lengths of a trial: short drafts for a few candidates, chosen in turn."""
        counts = [0] * len(candidates)
        for _ in range(min(TRIAL_REQUESTS, len(candidates))):
            self._turn = (self._turn + 1) % len(candidates)
            counts[self._turn] = min(TRIAL_DRAFT, candidates[self._turn].most, room)
            room -= counts[self._turn]
        return counts

    def _maybe_start_trial(self, survival: Numbers) -> bool:
        """Return whether to run a trial although drafting seems not to pay off: once its time has been saved up."""
        if not self._trial and self._credit > 0:
            self._trial = 1
            # If draft rows fetch experts, one row per request is informative enough.
            self._trial_rows = TRIAL_REQUESTS * (TRIAL_DRAFT if self._price is None else 1)
        return self._trial > 0

    def _note_trial_step(self, decodes: int, seconds: float) -> None:
        usual = self._plain.at(decodes)
        self._credit -= max(0.0, seconds - usual) if usual else 0.0
        self._trial_token_seconds = usual / decodes

    def observe_step(self, step: Step, seconds: float) -> None:
        self._trial_token_seconds = 0.0
        in_flight = self._clock.launched[0].in_flight if self._clock.launched else None
        super().observe_step(step, seconds)
        if in_flight is not None:
            self._measured = in_flight.passes, in_flight.seconds()

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Record an outcome; tokens accepted in a trial bring the next trial forward."""
        self._credit = min(MOST_CREDIT, self._credit + accepted * self._trial_token_seconds)
        super().verified(request, drafted, accepted)

    def _propose(self, candidates: Sequence[Candidate]) -> list[Draft]:
        begun = time.perf_counter()
        found = super()._propose(candidates)
        seconds = time.perf_counter() - begun
        running = self._async_drafter.running if self._async_drafter is not None and candidates else None
        if running is None:
            self._device_seconds += seconds
            if self._trial:
                self._credit -= seconds
        passes: Sequence[int] = [len(draft.tokens) for draft in found]
        caught_up = 0
        if self._catch_up_drafter is not None and candidates:
            passes, caught_up = self._catch_up_drafter.passes, self._catch_up_drafter.caught_up
        self._ready = {candidate.request for candidate, count in zip(candidates, passes, strict=True) if count}
        if running is not None:
            self._draft_seconds -= seconds  # the device's measurement will include them
            self._in_flight = InFlightDrafts(passes, running)
        elif caught_up:
            each = max(0.0, seconds - self._drafting.seconds(passes)) / caught_up
            self._token_seconds += (each - self._token_seconds) * (OUTPUT_WEIGHT if self._token_seconds else 1.0)
        elif any(passes):
            self._measured = passes, seconds
        return found

    def _note_no_draft(self, request: Request, slot: int) -> None:
        """Record that no draft was made for a request, unless the request was not ready yet."""
        self._choice = None
        if request in self._ready:
            super()._note_no_draft(request, slot)

    def probe(self, running: Sequence[Request]) -> None:
        """Record the last measurement while the device computes; do not draft anything."""
        if self._measured is not None:
            if self._drafted:
                self._drafting.note(*self._measured)
            self._drafted = min(SHORT_DRAFTS, self._drafted + 1)
            self._measured = None

    # Branches

    def drafts(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[tuple[int, ...]]:
        if self._brancher is not None and candidates:
            self._brancher.wants_alternatives = self.most_branches > 0 and self._may_branch(decodes, rows)
        begun = time.perf_counter()
        drafts = super().drafts(candidates, decodes, rows, room)
        self._chain_seconds = time.perf_counter() - begun
        return drafts

    def _may_branch(self, decodes: int, rows: int) -> bool:
        """Return whether the rows of a short branch cost less than a token."""
        if not self._adaptive:
            return True
        if self._trial or self._drafted < SHORT_DRAFTS or self._drafting.most_known < 2:
            return False
        added = self._speculating.at(rows + BRANCH_ROWS) - self._speculating.at(rows)
        return added < self._plain.at(decodes) / decodes

    def branches(self, chains: Sequence[Chain], rows: int, room: int) -> tuple[list[Place], int]:
        """Return the branches to verify together with these drafts, in a step of `rows`, and how many tokens to draft
        after the first of each. `room`: maximum number of rows of all branches."""
        alternatives = [self._state(chain.request).draft.alternatives for chain in chains]
        if not self.most_branches or not any(alternatives):
            return [], 0
        if not self._adaptive:
            places = [place for _, place in likely_places(chains, alternatives, self._links, self.most_branches)]
            return places, max(chain.length for chain in chains)
        seconds = Seconds(self._speculating.at(rows) + self._chain_seconds,
                          lambda more: self._speculating.seconds(rows + more) - self._speculating.at(rows),
                          self._branch_pass_seconds)
        return choose_branches(chains, alternatives, self._links, self.most_branches, seconds, room)

    def _branch_pass_seconds(self, branches: int) -> float:
        """Return the expected seconds of a pass that extends branches: as measured, or like a pass that drafts."""
        if self._branch_passes:
            return self._branch_passes.at(branches)
        return self._drafting.seconds((2,) * branches) - self._drafting.seconds((1,) * branches)

    def extend_branches(self, seeds: Sequence[Seed]) -> list[tuple[int, ...]]:
        if not seeds:
            return []
        assert self._brancher is not None
        begun = time.perf_counter()
        found = self._brancher.extend(seeds)
        seconds, passes = time.perf_counter() - begun, max(seed.most for seed in seeds)
        if passes:
            self._branch_passes.note(len(seeds), seconds / passes)
        self._draft_seconds += seconds
        self._device_seconds += seconds
        self._proposed += sum(1 + len(tokens) for tokens in found)
        return found

    def branched(self, request: Request, right: int, token: int, branches: int, tokens: int, accepted: int) -> None:
        """Record the outcome of a draft with branches, before `verified`: `right` tokens of the chain were right, and
        `token` followed them. `tokens`: verified tokens of the branches, of which `accepted` were accepted."""
        self._links.note(self._state(request).draft.alternatives, right, token)
        self._branches += branches
        self._branches_accepted += accepted > 0
        self._branch_tokens += tokens
        request.drafts += DraftCounts(tokens=tokens)

    def stats(self) -> SpeculationStats:
        chains = super().stats()
        return dataclasses.replace(chains, counts=chains.counts + DraftCounts(tokens=self._branch_tokens),
                                   branches=self._branches, branches_accepted=self._branches_accepted)
