"""How often drafts were right, by request and position: what is expected of the next one.

Of each request and position three sums are kept, in which old outcomes fade: how often a draft got that far, how sure
the drafter was of the tokens that it offered there, and how many of them were right. A request of which little is known
is taken for the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FADE = 0.9  # what is left of a request's sums after an outcome
FADE_ALL = 0.99  # of those over all requests
OWN_WEIGHT = 3.0  # outcomes of the mean that a request's own are added to
DOUBT = 1.0  # outcomes that a position is taken to have had
SURE = 0.98  # no token is surer than this

Chances = npt.NDArray[np.float64]


class Acceptance:
    def __init__(self, positions: int, slots: int = 64, hope: float = 0.0) -> None:
        """Start counting. `hope`: how often drafts are taken to be right before anything is known of them."""
        self._hope = hope
        self._reached = np.zeros((slots, positions))
        self._offered = np.zeros((slots, positions))
        self._right = np.zeros((slots, positions))
        self._all_reached = np.zeros(positions)  # over all requests
        self._all_offered = np.zeros(positions)
        self._all_right = np.zeros(positions)
        self._free = list(range(slots - 1, -1, -1))
        self._positions = positions
        self._noted: list[tuple[int, Sequence[float], int, bool]] = []

    def add(self) -> int:
        """Return a slot for a request."""
        if not self._free:
            count = len(self._reached)
            for name in ("_reached", "_offered", "_right"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros((count, self._positions)))))
            self._free = list(range(2 * count - 1, count - 1, -1))
        self._take_in()
        slot = self._free.pop()
        self._reached[slot] = self._offered[slot] = self._right[slot] = 0
        return slot

    def remove(self, slot: int) -> None:
        self._take_in()
        self._free.append(slot)

    def note(self, slot: int, confidence: Sequence[float], right: int, cut: bool) -> None:
        """Take in an outcome: the first `right` tokens offered were right. `cut`: the drafter would have offered more
        than were tried, so that nothing is known of the position behind them."""
        self._noted.append((slot, confidence, right, cut))

    def _take_in(self) -> None:
        """Add what was noted to the sums, those of many requests at once; of a request the last outcome counts."""
        if not self._noted:
            return
        noted, self._noted = list({each[0]: each for each in self._noted}.values()), []
        positions = np.arange(self._positions)
        slots, right = np.array([each[0] for each in noted]), np.array([each[2] for each in noted])
        sure = _padded([each[1] for each in noted], self._positions)
        count = np.array([min(len(each[1]), self._positions) for each in noted])
        tried = np.minimum(right + 1, count)  # positions of which something is known
        ended = (right >= count) & ~np.array([each[3] for each in noted])  # it got behind them, and nothing was offered
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
        """Return the chance [requests, positions] that the next draft is right up to each position, if one is made."""
        self._take_in()
        mean = _ratios(self._all_right, self._all_reached, self._hope)
        chances = (self._right[slots] + OWN_WEIGHT * mean) / (self._reached[slots] + OWN_WEIGHT)
        return np.cumprod(np.minimum(chances, SURE), axis=1, dtype=np.float64)

    def chances(self, slots: Sequence[int], confidence: Sequence[Sequence[float]]) -> Chances:
        """Return the chance [requests, positions] that drafts at hand are right up to each position; 0 behind them."""
        self._take_in()
        mean = _ratios(self._all_right, self._all_offered, self._hope)
        trust = (self._right[slots] + OWN_WEIGHT * mean) / (self._offered[slots] + OWN_WEIGHT)
        sure = _padded(confidence, self._positions)
        return np.cumprod(np.minimum(trust * sure, SURE), axis=1, dtype=np.float64)


def _ratios(right: Chances, of: Chances, hope: float) -> Chances:
    """Return right / of, where a position of which little is known is taken for the one before it, and the first for
    `hope`."""
    ratio, found = hope, list[float]()
    for hits, count in zip(right.tolist(), of.tolist(), strict=True):
        ratio = (hits + DOUBT * ratio) / (count + DOUBT)
        found.append(ratio)
    return np.array(found)


def _padded(rows: Sequence[Sequence[float]], width: int) -> Chances:
    return np.array([(*row[:width], *(0.0,) * (width - len(row))) for row in rows], dtype=np.float64)
