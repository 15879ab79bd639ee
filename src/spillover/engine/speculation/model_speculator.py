"""Decides how much to draft where a model drafts: each token of a draft costs a pass, so the choice comes first.

Nothing is drafted for the statistics alone, as that would take the device's time: a drafter is taken to be fairly good
until it was tried, and where it does not pay it is tried again on running requests, in at most PROBE_SHARE of the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from spillover.engine.speculation.costs import Numbers
from spillover.engine.speculation.draft_costs import DraftCosts, best_counts
from spillover.engine.speculation.drafter import Draft, Drafter
from spillover.engine.speculation.expert_price import ExpertPrice
from spillover.engine.speculation.speculator import AdaptiveSpeculator, Candidate

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

HOPE = 0.6  # share of tokens that are taken to be right before one was tried
TRIAL_DRAFT = 4  # tokens of a draft that is made though it seems not to pay
TRIAL_REQUESTS = 8  # that such drafts are made for


@runtime_checkable
class CountsPasses(Protocol):
    @property
    def passes(self) -> Sequence[int]:
        """Return how many passes the last call took for each request; empty where it did something else too."""
        ...


def make_speculator(drafter: Drafter, most_tokens: int, adaptive: bool = True, simulated: bool = False,
                    price: ExpertPrice | None = None) -> AdaptiveSpeculator:
    kind = ModelSpeculator if drafter.sequential else AdaptiveSpeculator
    return kind(drafter, most_tokens, adaptive, simulated, price)


class ModelSpeculator(AdaptiveSpeculator):
    hope = HOPE

    def __init__(self, drafter: Drafter, most_tokens: int, adaptive: bool = True, simulated: bool = False,
                 price: ExpertPrice | None = None) -> None:
        super().__init__(drafter, most_tokens, adaptive, simulated, price)
        self._drafting = DraftCosts()

    def _gain(self, survival: Numbers, rows: int) -> float:
        return best_counts(survival, len(survival), rows, self._speculating, self._plain, self._room(rows),
                           self._drafting)[1]

    def _asked(self, candidates: Sequence[Candidate], decodes: int, rows: int, room: int) -> list[int]:
        if self._trial:
            counts = self._trial_counts(candidates, room)
        else:
            chosen, gain = best_counts(self._possible(candidates), decodes, rows, self._speculating, self._plain, room,
                                       self._drafting)
            counts = chosen.tolist() if gain > 1 else [0] * len(candidates)
        # Of what was never measured, little is tried at first.
        limit = (1, TRIAL_DRAFT, self.most_tokens)[self._drafting.most_known]
        return [min(count, limit) for count in counts]

    def _trial_counts(self, candidates: Sequence[Candidate], room: int) -> list[int]:
        """Return short drafts for a few of the candidates, others every time."""
        counts = [0] * len(candidates)
        for _ in range(min(TRIAL_REQUESTS, len(candidates))):
            self._turn = (self._turn + 1) % len(candidates)
            counts[self._turn] = min(TRIAL_DRAFT, candidates[self._turn].most, room)
            room -= counts[self._turn]
        return counts

    def _try_again(self, survival: Numbers) -> bool:
        """Return whether to draft though it seems not to pay: when the time that it costs has been saved up."""
        if not self._trial and self._credit > 0:
            self._trial = 1
        return self._trial > 0

    def _tried(self, decodes: int, seconds: float) -> None:
        usual = self._plain.at(decodes)
        self._credit -= max(0.0, seconds - usual) if usual else 0.0

    def _propose(self, candidates: Sequence[Candidate]) -> list[Draft]:
        begun = time.perf_counter()
        found = super()._propose(candidates)
        seconds = time.perf_counter() - begun
        self._device_seconds += seconds
        if self._trial:
            self._credit -= seconds
        # Of drafters that do not say how many passes they took: as many as the longest draft has tokens.
        passes = (self._drafter.passes if isinstance(self._drafter, CountsPasses)
                  else [len(draft.tokens) for draft in found])
        if any(passes):
            self._drafting.note(passes, seconds)
        return found

    def _nothing(self, slot: int) -> None:
        """Do nothing: what the drafter knows of the request is not complete yet, and says nothing of its drafts."""

    def probe(self, running: Sequence[Request]) -> None:
        """Do nothing: a draft that nobody verifies would take the device's time."""
