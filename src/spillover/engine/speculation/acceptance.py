"""Statistics of how often draft tokens were right, by request and position, from which the next draft is predicted.

Three fading sums are kept per request and position: how often a draft reached the position, the drafter's confidence in
the tokens that it proposed there, and how many of these were right. A request with few outcomes is assumed to be like
the mean of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FADE = 0.9  # factor by which the sums of a request fade per outcome
FADE_ALL = 0.99  # factor by which the sums over all requests fade per outcome
OWN_WEIGHT = 3.0  # weight of the mean of all requests, in outcomes, when it is combined with a request's outcomes
DOUBT = 1.0  # weight of the previous position's ratio, in outcomes, as the prior of a position
SURE = 0.98  # maximum chance of a token to be right

Chances = npt.NDArray[np.float64]


class Acceptance:
    def __init__(self, positions: int, slots: int = 64, hope: float = 0.0) -> None:
        """Start counting. `hope`: assumed share of right draft tokens before anything is known."""
        self._hope = hope
        self._reached = np.zeros((slots, positions))
        self._offered = np.zeros((slots, positions))
        self._right = np.zeros((slots, positions))
        self._all_reached = np.zeros(positions)  # this and the next two: sums over all requests
        self._all_offered = np.zeros(positions)
        self._all_right = np.zeros(positions)
        self._free = list(range(slots - 1, -1, -1))
        self._positions = positions
        self._pending: list[tuple[int, Sequence[float], int, bool]] = []

    def add(self) -> int:
        """Return a slot for a request."""
        if not self._free:
            count = len(self._reached)
            for name in ("_reached", "_offered", "_right"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros((count, self._positions)))))
            self._free = list(range(2 * count - 1, count - 1, -1))
        self._apply_pending()
        slot = self._free.pop()
        self._reached[slot] = self._offered[slot] = self._right[slot] = 0
        return slot

    def remove(self, slot: int) -> None:
        self._apply_pending()
        self._free.append(slot)

    def note(self, slot: int, confidence: Sequence[float], right: int, cut: bool) -> None:
        """Record an outcome: the first `right` proposed tokens were right. `cut`: the drafter would have proposed more
        tokens than were tried, so nothing is known about the position after them."""
        self._pending.append((slot, confidence, right, cut))

    def _apply_pending(self) -> None:
        """Add the recorded outcomes to the sums, all requests at once; per request only the last outcome counts."""
        if not self._pending:
            return
        outcomes, self._pending = list({each[0]: each for each in self._pending}.values()), []
        positions = np.arange(self._positions)
        slots, right = np.array([each[0] for each in outcomes]), np.array([each[2] for each in outcomes])
        sure = _padded([each[1] for each in outcomes], self._positions)
        count = np.array([min(len(each[1]), self._positions) for each in outcomes])
        tried = np.minimum(right + 1, count)  # number of positions whose outcome is known
        ended = (right >= count) & ~np.array([each[3] for each in outcomes])  # all right, and no further token proposed
        reached = positions < np.where(ended, count + 1, tried)[:, None]
        parts = (np.where(reached, 1.0, 0.0), np.where(positions < tried[:, None], sure, 0.0),
                 np.where(positions < np.minimum(right, count)[:, None], 1.0, 0.0))
        fade, fade_all = np.where(reached, FADE, 1.0), FADE_ALL ** reached.sum(axis=0)
        for own, of_all, part in zip((self._reached, self._offered, self._right),
                                     (self._all_reached, self._all_offered, self._all_right), parts, strict=True):
            own[slots] = own[slots] * fade + part
            of_all *= fade_all
            of_all += part.sum(axis=0)

    def survival(self, slots: Sequence[int]) -> Chances:
        """Return the chance [requests, positions] that the next draft, if one is made, is right up to each position."""
        self._apply_pending()
        mean = _ratios(self._all_right, self._all_reached, self._hope)
        chances = (self._right[slots] + OWN_WEIGHT * mean) / (self._reached[slots] + OWN_WEIGHT)
        return np.cumprod(np.minimum(chances, SURE), axis=1, dtype=np.float64)

    def chances(self, slots: Sequence[int], confidence: Sequence[Sequence[float]]) -> Chances:
        """Return the chance [requests, positions] that given drafts are right up to each position, 0 after it"""
        self._apply_pending()
        mean = _ratios(self._all_right, self._all_offered, self._hope)
        trust = (self._right[slots] + OWN_WEIGHT * mean) / (self._offered[slots] + OWN_WEIGHT)
        sure = _padded(confidence, self._positions)
        return np.cumprod(np.minimum(trust * sure, SURE), axis=1, dtype=np.float64)


def _ratios(right: Chances, of: Chances, hope: float) -> Chances:
    """Return right / of by position; a position with few outcomes is assumed to be like the previous one, and the first
    one to have the ratio `hope`."""
    ratio, found = hope, list[float]()
    for hits, count in zip(right.tolist(), of.tolist(), strict=True):
        ratio = (hits + DOUBT * ratio) / (count + DOUBT)
        found.append(ratio)
    return np.array(found)


def _padded(rows: Sequence[Sequence[float]], width: int) -> Chances:
    return np.array([(*row[:width], *(0.0,) * (width - len(row))) for row in rows], dtype=np.float64)
