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
SURE = 0.98  # no token is surer than this

Chances = npt.NDArray[np.float64]


class Acceptance:
    def __init__(self, positions: int, slots: int = 64) -> None:
        self._reached = np.zeros((slots, positions))
        self._offered = np.zeros((slots, positions))
        self._right = np.zeros((slots, positions))
        # Over all requests; a doubt, which keeps the first few outcomes from being taken for certain.
        self._all_reached = np.ones(positions)
        self._all_offered = np.ones(positions)
        self._all_right = np.zeros(positions)
        self._free = list(range(slots - 1, -1, -1))
        self._positions = positions

    def add(self) -> int:
        """Return a slot for a request."""
        if not self._free:
            count = len(self._reached)
            for name in ("_reached", "_offered", "_right"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros((count, self._positions)))))
            self._free = list(range(2 * count - 1, count - 1, -1))
        slot = self._free.pop()
        self._reached[slot] = self._offered[slot] = self._right[slot] = 0
        return slot

    def remove(self, slot: int) -> None:
        self._free.append(slot)

    def note(self, slot: int, confidence: Sequence[float], right: int, cut: bool) -> None:
        """Take in an outcome: the first `right` tokens offered were right. `cut`: the drafter would have offered more
        than were tried, so that nothing is known of the position behind them."""
        count = min(len(confidence), self._positions)
        tried = min(right + 1, count)  # positions of which something is known
        reached = tried
        if right >= count and not cut and count < self._positions:
            reached = count + 1  # it got there, and nothing was offered
        for sums, fade in (((self._reached[slot], self._offered[slot], self._right[slot]), FADE),
                           ((self._all_reached, self._all_offered, self._all_right), FADE_ALL)):
            for part in sums:
                part[:reached] *= fade
            sums[0][:reached] += 1
            sums[1][:tried] += confidence[:tried]
            sums[2][:min(right, count)] += 1

    def survival(self, slots: Sequence[int]) -> Chances:
        """Return the chance [requests, positions] that the next draft is right up to each position, if one is made."""
        mean = self._all_right / self._all_reached
        chances = (self._right[slots] + OWN_WEIGHT * mean) / (self._reached[slots] + OWN_WEIGHT)
        return np.cumprod(np.minimum(chances, SURE), axis=1, dtype=np.float64)

    def chances(self, slot: int, confidence: Sequence[float]) -> Chances:
        """Return the chance that a draft at hand is right up to each of its positions."""
        count = len(confidence)
        mean = self._all_right[:count] / self._all_offered[:count]
        trust = ((self._right[slot, :count] + OWN_WEIGHT * mean)
                 / (self._offered[slot, :count] + OWN_WEIGHT))
        return np.cumprod(np.minimum(trust * np.asarray(confidence), SURE), dtype=np.float64)
