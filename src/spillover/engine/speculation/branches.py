"""Branches of drafts: other tokens where the drafting model was unsure, and the tokens that follow them.

With branches a draft is a tree instead of a chain. A branch is verified as a sequence of its own: it shares the
complete KV blocks of its request, and the rows after these are computed once more, up to where it differs from the
chain. So attention needs no mask, and if a branch is accepted, its blocks replace those of the request. This takes more
rows than a tree needs, and pays off where the rows of a step cost little: where weights are streamed.

This file estimates which branches pay off. Whether a draft token or its alternative is right is learned by the gap
between their log probabilities.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spillover.engine.speculation.acceptance import SURE
from spillover.engine.speculation.costs import Numbers
from spillover.engine.speculation.drafters.drafter import Alternative

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

GAPS = (-1.0, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bounds of the classes of gaps
PRIOR = 4.0  # weight of the assumed shares of right tokens, in outcomes
FADE = 0.98  # factor by which the sums of a class fade per outcome
STEP_BRANCHES = 16  # maximum number of branches of a step
_COUNTS = (1, 2, 3, 4, 6, 8, 12, STEP_BRANCHES)  # numbers of branches that are compared
_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of tokens after the first of a branch, likewise


class Seed(NamedTuple):
    """A branch to be extended by the drafter."""

    request: Request
    prefix: tuple[int, ...]  # the tokens after the request's: the draft up to the branch, and the branch's first token
    most: int  # number of tokens to draft after these
    start: int  # the first position that has no KV in the branch's blocks
    tables: tuple[tuple[int, ...], ...]  # block tables of the branch, one per layer group


class Chain(NamedTuple):
    """A draft that is about to be verified."""

    request: Request
    length: int  # number of its tokens
    again: int  # rows that each branch computes in addition to its draft: since the last complete block


class Place(NamedTuple):
    """Where a branch begins."""

    chain: int  # index of the chain
    at: int  # number of the chain's tokens before the branch
    token: int  # first token of the branch


class LinkStats:
    """How often drafted tokens, and their alternatives, were right, by the gap between them."""

    def __init__(self) -> None:
        middles = np.array([GAPS[0] - 1, *(sum(bounds) / 2 for bounds in itertools.pairwise(GAPS)), GAPS[-1] + 1])
        own = 1 / (1 + np.exp(-middles))  # right if one of both is, and probabilities are exact
        self._tried = np.full(len(middles), PRIOR)
        self._own = PRIOR * own
        self._other = PRIOR * (1 - own)

    def chances(self, alternatives: Sequence[Alternative]) -> tuple[Numbers, Numbers]:
        """Return, for each token of a draft, the chances that it is right and that its alternative is, if all tokens
        before it are right."""
        classes = [bisect_right(GAPS, each.gap) for each in alternatives]
        return self._own[classes] / self._tried[classes], self._other[classes] / self._tried[classes]

    @property
    def usual(self) -> float:
        """Return the share of drafted tokens that are right if all tokens before them are."""
        return min(SURE, float(self._own.sum() / self._tried.sum()))

    def note(self, alternatives: Sequence[Alternative], right: int, token: int) -> None:
        """Record that the first `right` tokens of a draft were right, and that `token` followed them."""
        for position, each in enumerate(alternatives[:right + 1]):
            index = bisect_right(GAPS, each.gap)
            for sums in (self._tried, self._own, self._other):
                sums[index] *= FADE
            self._tried[index] += 1
            if position < right:
                self._own[index] += 1
            elif each.token == token:
                self._other[index] += 1


class Seconds(NamedTuple):
    """The costs that a choice of branches depends on."""

    step: float  # of the step with the chains, and of drafting these
    rows: Callable[[Numbers], Numbers]  # of further rows in that step, by their number
    draft_pass: Callable[[int], float]  # of a drafting pass, by the number of branches that it serves


def likely_places(chains: Sequence[Chain], alternatives: Sequence[Sequence[Alternative]], stats: LinkStats,
                  most: int) -> list[tuple[float, Place]]:
    """Return up to `most` places per chain with their chances to be accepted, the likeliest first."""
    found = []
    for index, (chain, others) in enumerate(zip(chains, alternatives, strict=True)):
        others = others[:chain.length]
        if not others:
            continue
        own, other = stats.chances(others)
        hits = np.cumprod(np.concatenate(([1.0], own[:-1]))) * other
        for at in np.argsort(-hits, kind="stable")[:most].tolist():
            found.append((float(hits[at]), Place(index, at, others[at].token)))
    found.sort(key=lambda each: -each[0])
    return found[:STEP_BRANCHES]


def choose_branches(chains: Sequence[Chain], alternatives: Sequence[Sequence[Alternative]], stats: LinkStats,
                    most: int, seconds: Seconds, room: int) -> tuple[list[Place], int]:
    """Return the branches that are expected to pay off, and how many tokens to draft after the first of each.

    `most`: maximum number of branches per chain; `room`: maximum number of rows of all branches.
    """
    likely = likely_places(chains, alternatives, stats, most)
    tokens = sum(1 + float(np.cumprod(stats.chances(others[:chain.length])[0]).sum()) if others else 1.0
                 for chain, others in zip(chains, alternatives, strict=True))
    worth, usual = seconds.step / tokens, stats.usual
    chances = np.array([chance for chance, _ in likely])
    again = np.array([chains[place.chain].again + place.at + 1 for _, place in likely])
    depths = np.array([chains[place.chain].length - place.at - 1 for _, place in likely])
    best: tuple[list[Place], int] = ([], 0)
    gain = 0.0
    for count in (count for count in _COUNTS if count <= len(likely)):
        draft_pass = seconds.draft_pass(count)
        deepest = int(depths[:count].max())
        for length in (*(length for length in _LENGTHS if length < deepest), deepest):
            more = np.minimum(depths[:count], length)
            rows = float((again[:count] + more).sum())
            if rows > room:
                break
            following = (1 - usual ** (more + 1)) / (1 - usual)  # expected tokens that an accepted branch brings
            saved = worth * float((chances[:count] * following).sum())
            saved -= float(seconds.rows(np.array([rows]))[0]) + length * draft_pass
            if saved > gain:
                best, gain = ([place for _, place in likely[:count]], length), saved
    return best
