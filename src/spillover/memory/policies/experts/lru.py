"""LRU within each layer's quota of expert slots."""

from __future__ import annotations

from collections.abc import Sequence


class LRUQuota:
    """A policy that gives all experts the same worth, so that the least recently used one is evicted first.

    It depends on one quota per layer: with one LRU order over all layers, a token, which passes through every layer,
    would evict each expert before the next token uses it.
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
