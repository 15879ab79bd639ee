"""The optimal policy, an upper bound: evicts the expert whose next use is latest. Only for replays of recorded logs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

Trace = Sequence[Sequence[Sequence[int]]]  # the distinct experts of each step and layer


class Belady:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._now = 0

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        self._experts = experts
        self._uses: list[list[list[int]]] = [[[] for _ in range(experts)] for _ in range(layers)]
        for step, by_layer in enumerate(self._trace):
            for layer, used in enumerate(by_layer):
                for expert in used:
                    self._uses[layer][expert].append(step)

    def on_phase(self, phase: str) -> None:
        pass

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        self._now = step

    def worth(self, layer: int) -> Sequence[float]:
        return [-self._next_use(layer, expert) for expert in range(self._experts)]

    def prefetch(self, layer: int) -> Sequence[int]:
        return ()

    def _next_use(self, layer: int, expert: int) -> float:
        uses = self._uses[layer][expert]
        place = bisect.bisect_right(uses, self._now)
        return uses[place] if place < len(uses) else math.inf
