"""A fixed choice: the first experts of every layer stay on the device, whatever the routing."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Static:
    """A policy that never evicts the first `kept` experts of a layer; misses share the remaining slots of its quota."""

    def __init__(self, kept: int | None = None) -> None:
        """Keep this number of experts per layer; None: seven eighths of the quota."""
        self._kept = kept

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        kept = max(0, quota - max(1, quota // 8)) if self._kept is None else self._kept
        self._worth = (math.inf,) * kept + (0.0,) * (experts - kept)

    def on_phase(self, phase: str) -> None:
        pass

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        pass

    def worth(self, layer: int) -> Sequence[float]:
        return self._worth

    def prefetch(self, layer: int) -> Sequence[int]:
        return ()
