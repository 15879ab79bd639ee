"""The cost of drafts made by a model, and the choice of how many tokens to draft for each request.

A model drafts token by token, for many requests at once: a draft of K tokens takes K passes, and a pass serves the
requests that still need a token. The first pass also computes the tokens accepted last and includes the latency of the
call to the device, so it is measured separately from the later passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spillover.engine.speculation.costs import Numbers, StepCosts, best_count, plain_seconds

_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # maximum draft lengths that are compared


class DraftCosts:
    """Seconds of draft passes by the number of requests that they serve."""

    def __init__(self) -> None:
        self._first = StepCosts()
        self._more = StepCosts()

    @property
    def most_known(self) -> int:
        """Return up to which draft length costs were measured: 0, 1, or 2 for any length."""
        return 0 if not self._first else 1 if not self._more else 2

    def note(self, counts: Sequence[int], seconds: float) -> None:
        """Record the seconds that drafting took. `counts`: number of draft tokens for each request."""
        passes = _passes(counts)
        if len(passes) == 1 or (len(passes) and not self._first):
            self._first.note(int(passes[0]), seconds / len(passes))
        if len(passes) < 2:
            return
        first = float(self._first.seconds(passes[:1])[0])
        if self._first.known(int(passes[0])) and all(self._more.known(int(served)) for served in passes[1:]):
            # Long drafts alone cannot show that the first pass changed speed: assume it changed like the others.
            first *= seconds / self.seconds(counts)
            self._first.note(int(passes[0]), first)
        rest = max(0.0, seconds - first)
        if passes[1] == passes[-1]:  # all later passes serve the same number of requests
            self._more.note(int(passes[1]), rest / (len(passes) - 1))
            return
        expected = self._more.seconds(passes[1:])
        shares = expected / expected.sum() if expected.sum() > 0 else np.full(len(passes) - 1, 1 / (len(passes) - 1))
        for served in np.unique(passes[1:]):
            self._more.note(int(served), float(rest * shares[passes[1:] == served].mean()))

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the expected seconds of drafting `counts` tokens for each request; 0 if nothing is known."""
        passes = _passes(counts)
        if not len(passes):
            return 0.0
        return float(self._first.seconds(passes[:1])[0] + self._more.seconds(passes[1:]).sum())

    def steps(self, positions: npt.NDArray[np.int64], requests: int) -> Numbers:
        """Return the seconds that each token adds if tokens at these positions of drafts are added one by one."""
        served = np.arange(requests + 1.0)
        costs_of = [self._first.seconds(served), self._more.seconds(served)]
        added: Numbers = np.diff(np.where(served > 0, costs_of, 0.0), axis=1)
        if requests == 1:
            return np.take(added[:, 0], np.minimum(positions, 1))
        costs = np.zeros(len(positions))
        for position in np.unique(positions):
            places = np.flatnonzero(positions == position)
            costs[places] = added[min(int(position), 1), :len(places)]
        return costs


def best_counts(chances: Numbers, decodes: int, rows: int, speculating: StepCosts, plain: StepCosts, most: int,
                drafting: DraftCosts) -> tuple[npt.NDArray[np.int64], float]:
    """Return how many tokens to draft for each request, and the speed relative to a plain step.

    `chances` [requests, positions]: chance that a draft is right up to each position, descending; the rest as for
    `best_drafts`. For each maximum length the likeliest tokens are taken first: another request in a pass is cheap.
    """
    requests, width = chances.shape
    flat = chances.ravel()
    order = np.argsort(-flat, kind="stable")[:int(np.count_nonzero(flat))]
    positions = order % width
    added = drafting.steps(positions, requests)
    counts, gain, usual = np.zeros(requests, dtype=np.int64), 0.0, plain_seconds(plain, decodes, rows)
    verifying = speculating.with_drafts(rows, min(len(order), most))
    for depth in (*(depth for depth in _DEPTHS if depth < width), width):
        taken = np.flatnonzero(positions < depth)[:most]
        likely, seconds = flat[order[taken]], verifying[:len(taken) + 1].copy()
        seconds[1:] += np.cumsum(added[taken])
        chosen, speed = best_count(likely, seconds + speculating.price(likely), decodes, usual)
        if chosen and speed > gain:
            counts = np.bincount(order[taken[:chosen]] // width, minlength=requests)
            gain = speed
    return counts, gain or 1.0


def _passes(counts: Sequence[int]) -> Numbers:
    """Return the number of requests that each pass serves."""
    counted = np.asarray(counts, dtype=np.int64)
    longest = int(counted.max(initial=0))
    served: Numbers = (counted[:, None] > np.arange(longest)).sum(axis=0).astype(np.float64)
    return served
