"""Least frequently and recently used: uses count, and fade."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HALF_LIFE = 64.0  # steps after which a use counts half


class LFRU:
    """An expert's worth is the number of its uses, each faded by its age: one that a stray token brought in goes before
    one that is asked for again and again, and habits of the last topic are forgotten."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._growth = 2.0 ** (1.0 / half_life)

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        # A use at step t adds growth**t: fading all by growth**-1 a step is left out, it would change no order.
        self._worth: npt.NDArray[np.float64] = np.zeros((layers, experts))
        self._origin = 0

    def on_phase(self, phase: str) -> None:
        pass

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        if step - self._origin > 4096:  # before float64 overflows
            self._worth /= self._growth ** (step - self._origin)
            self._origin = step
        self._worth[layer, list(experts)] += self._growth ** (step - self._origin)

    def worth(self, layer: int) -> Sequence[float]:
        top = self._worth[layer].max()
        scaled: list[float] = (self._worth[layer] / top if top > 0 else self._worth[layer]).tolist()
        return scaled

    def prefetch(self, layer: int) -> Sequence[int]:
        return ()
