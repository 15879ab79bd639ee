"""Least frequently and recently used: the uses of an expert are counted, and decay with age."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HALF_LIFE = 64.0  # number of steps after which a use counts half


class LFRU:
    """A policy whose worth of an expert is the number of its uses, each decayed by its age: an expert that one stray
    token used is evicted before one that is used repeatedly, and the routing of past topics is forgotten."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._growth = 2.0 ** (1.0 / half_life)

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        # A use at step t adds growth**t, which gives the same order as decaying every worth by 1/growth per step.
        self._worth: npt.NDArray[np.float64] = np.zeros((layers, experts))
        self._origin = 0

    def on_phase(self, phase: str) -> None:
        pass

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        if step - self._origin > 4096:  # rescale before float64 overflows
            self._worth /= self._growth ** (step - self._origin)
            self._origin = step
        self._worth[layer, list(experts)] += self._growth ** (step - self._origin)

    def worth(self, layer: int) -> Sequence[float]:
        top = self._worth[layer].max()
        scaled: list[float] = (self._worth[layer] / top if top > 0 else self._worth[layer]).tolist()
        return scaled

    def prefetch(self, layer: int) -> Sequence[int]:
        return ()
