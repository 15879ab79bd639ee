"""Least recently used, within each layer's quota."""

from __future__ import annotations

from collections.abc import Sequence


class LRUQuota:
    """All are worth the same, so that the one unused for longest goes first.

    A quota a layer is what makes it work: over all layers together, a token that passes through every layer would have
    driven out each expert before the next token comes back to it.
    """

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        self._same = (0.0,) * experts

    def on_phase(self, phase: str) -> None:
        pass

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        pass

    def worth(self, layer: int) -> Sequence[float]:
        return self._same

    def prefetch(self, layer: int) -> Sequence[int]:
        return ()
