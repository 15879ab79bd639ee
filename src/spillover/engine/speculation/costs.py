"""What steps cost by their number of rows, learned while they run, and how many draft rows are worth it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median_low

import numpy as np
import numpy.typing as npt

KEPT = 7  # measurements of a size; their median counts, as one may have captured a graph or waited for a disk
DOUBTED = 3.0  # times the most expected: a first measurement of a size above it compiled a kernel or captured a graph
NEAR = 1.5  # times the rows up to which a step's cost says something of another's
ROUNDS = 4  # until the best number of rows stays the same

Numbers = npt.NDArray[np.float64]


class StepCosts:
    """Seconds of a step by its rows; sizes between those that were measured are interpolated."""

    def __init__(self, below: StepCosts | None = None) -> None:
        """Start without measurements. `below`: costs of another kind of steps, which say how those of sizes not
        measured here grow."""
        self._below = below
        self._measured: dict[int, deque[float]] = {}
        self._doubted: set[int] = set()  # sizes whose first measurement was left out
        self._curve: tuple[Numbers, Numbers] | None = None

    def __bool__(self) -> bool:
        return bool(self._measured)

    def note(self, rows: int, seconds: float) -> None:
        size = _size(rows)
        if size not in self._measured and size not in self._doubted and 0 < DOUBTED * self._most(rows) < seconds:
            self._doubted.add(size)
            return
        self._measured.setdefault(size, deque(maxlen=KEPT)).append(seconds)
        self._curve = None

    def _most(self, rows: int) -> float:
        """Return what a step costs at most, if each row costs as much as those of smaller steps; 0: nothing is
        known."""
        smaller = [size for size in self._measured if size <= rows]
        return self.at(rows) * (rows / max(smaller) if smaller else 1.0)

    def covers(self, rows: int) -> bool:
        """Return whether a step of about as many rows was measured."""
        return any(rows <= NEAR * size and size <= NEAR * rows for size in self._measured)

    def known(self, rows: int) -> bool:
        return _size(rows) in self._measured

    def seconds(self, rows: Numbers) -> Numbers:
        """Return what steps of these rows cost; never less than smaller ones."""
        if not self._measured:
            return self._below.seconds(rows) if self._below is not None else np.zeros_like(rows)
        sizes, costs = self._points()
        inside = np.interp(rows, sizes, costs)
        if self._below and rows.max(initial=0.0) > sizes[-1]:
            inside += np.where(rows > sizes[-1], self._growth(rows, sizes[-1], costs[-1]), 0.0)
        return inside

    def _growth(self, rows: Numbers, size: float, cost: float) -> Numbers:
        """Return what steps of more than `size` rows, which cost `cost`, cost more than that, by steps of the other
        kind. Where those that were measured are all larger, the cost rises evenly to the least of them: a step of a
        prompt tells nothing of a few rows, which need not be free."""
        assert self._below is not None
        least = self._below.smallest
        beyond = self._below.seconds(np.maximum(rows, least)) - self._below.at(int(max(size, least)))
        rise = max(self._below.at(int(least)) - cost, 0.0) if least > size else 0.0
        share = np.clip((rows - size) / (least - size), 0.0, 1.0) if least > size else np.zeros_like(rows)
        grown: Numbers = np.maximum(beyond, 0.0) + rise * share
        return grown

    @property
    def smallest(self) -> float:
        """Return the rows of the smallest step that was measured, here or of the other kind."""
        own = float(min(self._measured, default=np.inf))
        return own if self._below is None or not self._below else min(own, self._below.smallest)

    def at(self, rows: int) -> float:
        return float(self.seconds(np.array([float(rows)]))[0])

    def with_drafts(self, rows: int, most: int) -> Numbers:
        """Return what steps of `rows` and 0, 1, 2, ... up to `most` draft rows cost, but for their price."""
        return self.seconds(rows + np.arange(most + 1.0))

    def price(self, chances: Numbers) -> Numbers | float:
        """Return what the first 0, 1, 2, ... of draft rows cost besides that are accepted by these chances."""
        return 0.0

    def _points(self) -> tuple[Numbers, Numbers]:
        if self._curve is None:
            sizes = sorted(self._measured)
            costs = [median_low(self._measured[size]) for size in sizes]
            # A step costs no more than a larger one: what says otherwise was measured long ago, or disturbed.
            falling = np.minimum.accumulate(np.array(costs)[::-1])
            self._curve = np.array(sizes, dtype=np.float64), falling[::-1]
        return self._curve


_SIZES: list[int] = [*range(1, 17), *(int(16 * 2 ** (step / 4)) for step in range(1, 49))]


def _size(rows: int) -> int:
    """Return the size that a step of `rows` counts as: itself, or from 16 on one of four between two powers of two."""
    return _SIZES[min(bisect_left(_SIZES, rows), len(_SIZES) - 1)]


def best_drafts(chances: Numbers, decodes: int, rows: int, speculating: StepCosts, plain: StepCosts,
                most: int) -> tuple[int, float]:
    """Return how many draft rows to verify, the likeliest first, and the gain in speed over a plain step.

    `chances`: of each draft row to be accepted, falling; `decodes`: requests that get a token anyhow; `rows`: of the
    step without drafts; `most`: draft rows there is room for. A decoded token is worth what it costs in a plain step,
    or less where speculation makes it cheaper.
    """
    count = min(len(chances), most)
    seconds = speculating.with_drafts(rows, count) + speculating.price(chances[:count])
    return best_count(chances[:count], seconds, decodes, plain_seconds(plain, decodes, rows))


def plain_seconds(plain: StepCosts, decodes: int, rows: int) -> tuple[float, float]:
    """Return what a plain step of `rows` costs, and one of `decodes` alone; 0 where nothing is known yet."""
    usual = plain.at(rows)
    return usual, usual if decodes == rows else plain.at(decodes) or usual


def best_count(chances: Numbers, seconds: Numbers, decodes: int, plain: tuple[float, float]) -> tuple[int, float]:
    """Do what `best_drafts` does, with what steps of 0, 1, 2, ... draft rows cost, their drafting included, and
    `plain_seconds`."""
    usual, alone = plain
    if usual <= 0.0:
        return 0, 1.0
    tokens = np.zeros(len(chances) + 1)
    np.cumsum(chances, out=tokens[1:])
    worth = alone / decodes
    chosen = 0
    for _ in range(ROUNDS):
        best = int(np.argmax(worth * tokens - seconds))
        gain = worth * tokens[best] - (seconds[best] - usual)
        if best == chosen or gain <= 0:
            chosen = best
            break
        chosen, worth = best, min(worth, float((alone + seconds[best] - usual) / (decodes + tokens[best])))
    extra = float(seconds[chosen]) - usual
    return chosen, float((1 + tokens[chosen] / decodes) / (1 + extra / alone))
