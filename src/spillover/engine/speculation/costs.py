"""The cost of steps by their number of rows, learned while they run, and the number of draft rows that pays off."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median_low

import numpy as np
import numpy.typing as npt

KEPT = 7  # measurements kept per size; their median counts, as one may include a graph capture or a wait for a disk
OUTLIER_FACTOR = 3.0  # a first measurement this many times over the expected maximum counts as compilation or capture
NEAR = 1.5  # maximum ratio of two numbers of rows for which the cost of one says something about the other
ROUNDS = 4  # maximum iterations until the best number of draft rows no longer changes

Numbers = npt.NDArray[np.float64]


class StepCosts:
    """Seconds of a step by its number of rows; sizes between the measured ones are interpolated."""

    def __init__(self, fallback: StepCosts | None = None) -> None:
        """Start without measurements. `fallback`: the costs of another kind of steps, from which growth beyond the
        sizes measured here is extrapolated."""
        self._fallback = fallback
        self._measured: dict[int, deque[float]] = {}
        self._discarded: set[int] = set()  # sizes whose first measurement was discarded
        self._curve: tuple[Numbers, Numbers] | None = None

    def __bool__(self) -> bool:
        return bool(self._measured)

    def note(self, rows: int, seconds: float) -> None:
        size = _size(rows)
        first = size not in self._measured and size not in self._discarded
        if first and 0 < OUTLIER_FACTOR * self._most(rows) < seconds:
            self._discarded.add(size)
            return
        self._measured.setdefault(size, deque(maxlen=KEPT)).append(seconds)
        self._curve = None

    def _most(self, rows: int) -> float:
        """Return an upper bound of a step's seconds, assuming that every row costs as much as in smaller steps; 0 if
        nothing is known."""
        smaller = [size for size in self._measured if size <= rows]
        return self.at(rows) * (rows / max(smaller) if smaller else 1.0)

    def covers(self, rows: int) -> bool:
        """Return whether a step with a similar number of rows was measured."""
        return any(rows <= NEAR * size and size <= NEAR * rows for size in self._measured)

    def known(self, rows: int) -> bool:
        return _size(rows) in self._measured

    def seconds(self, rows: Numbers) -> Numbers:
        """Return the seconds of steps with these numbers of rows, which never decrease with the number of rows."""
        if not self._measured:
            return self._fallback.seconds(rows) if self._fallback is not None else np.zeros_like(rows)
        sizes, costs = self._points()
        inside = np.interp(rows, sizes, costs)
        if self._fallback and rows.max(initial=0.0) > sizes[-1]:
            inside += np.where(rows > sizes[-1], self._growth(rows, sizes[-1], costs[-1]), 0.0)
        return inside

    def _growth(self, rows: Numbers, size: float, cost: float) -> Numbers:
        """Return the seconds that steps of more than `size` rows take in addition to `cost`, those of `size` rows, from
        the costs of the other kind of steps. If all its measured steps are larger, the cost rises linearly up to the
        smallest of them: a prompt step says nothing about a few more rows, which need not be free."""
        assert self._fallback is not None
        least = self._fallback.smallest
        beyond = self._fallback.seconds(np.maximum(rows, least)) - self._fallback.at(int(max(size, least)))
        rise = max(self._fallback.at(int(least)) - cost, 0.0) if least > size else 0.0
        share = np.clip((rows - size) / (least - size), 0.0, 1.0) if least > size else np.zeros_like(rows)
        grown: Numbers = np.maximum(beyond, 0.0) + rise * share
        return grown

    @property
    def smallest(self) -> float:
        """Return the number of rows of the smallest measured step, of this kind or the other."""
        own = float(min(self._measured, default=np.inf))
        return own if self._fallback is None or not self._fallback else min(own, self._fallback.smallest)

    def at(self, rows: int) -> float:
        return float(self.seconds(np.array([float(rows)]))[0])

    def with_drafts(self, rows: int, most: int) -> Numbers:
        """Return the seconds of steps of `rows` plus 0, 1, 2, ... `most` draft rows, without the `price` of these."""
        return self.seconds(rows + np.arange(most + 1.0))

    def price(self, chances: Numbers) -> Numbers | float:
        """Return the additional seconds of the first 0, 1, 2, ... draft rows, given their chances to be accepted."""
        return 0.0

    def _points(self) -> tuple[Numbers, Numbers]:
        if self._curve is None:
            sizes = sorted(self._measured)
            costs = [median_low(self._measured[size]) for size in sizes]
            # A step costs no more than a larger one: measurements that contradict this are old or were disturbed.
            falling = np.minimum.accumulate(np.array(costs)[::-1])
            self._curve = np.array(sizes, dtype=np.float64), falling[::-1]
        return self._curve


_SIZES: list[int] = [*range(1, 17), *(int(16 * 2 ** (step / 4)) for step in range(1, 49))]


def _size(rows: int) -> int:
    """Return the size class of a step of `rows`: `rows` itself up to 16, then one of four per power of two."""
    return _SIZES[min(bisect_left(_SIZES, rows), len(_SIZES) - 1)]


def best_drafts(chances: Numbers, decodes: int, rows: int, speculating: StepCosts, plain: StepCosts,
                most: int) -> tuple[int, float]:
    """Return how many draft rows to verify, the likeliest first, and the speed relative to a plain step.

    `chances`: the chance of each draft row to be accepted, descending; `decodes`: requests that get a token in any
    case; `rows`: rows of the step without drafts; `most`: maximum number of draft rows. A decoded token is worth its
    cost in a plain step, or less if speculation makes it cheaper.
    """
    count = min(len(chances), most)
    seconds = speculating.with_drafts(rows, count) + speculating.price(chances[:count])
    return best_count(chances[:count], seconds, decodes, plain_seconds(plain, decodes, rows))


def plain_seconds(plain: StepCosts, decodes: int, rows: int) -> tuple[float, float]:
    """Return the seconds of a plain step of `rows`, and of one of `decodes` rows; 0 if nothing is known yet."""
    usual = plain.at(rows)
    return usual, usual if decodes == rows else plain.at(decodes) or usual


def best_count(chances: Numbers, seconds: Numbers, decodes: int, plain: tuple[float, float]) -> tuple[int, float]:
    """Do the same as `best_drafts`. `seconds`: costs of steps with 0, 1, 2, ... draft rows, including the time to draft
    them; `plain`: the result of `plain_seconds`."""
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
