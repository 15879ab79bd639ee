"""Prefetching the next layer's experts, guessed from this layer's hidden state."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.memory.policies.experts.lru import LRUQuota


class NextLayer(LRUQuota):
    """LRU with prefetch of guessed experts. The runner applies the next layer's router to this layer's router input
    and calls `on_guess`: the residual stream changes little from layer to layer, so most of the guess is right."""

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        super().on_load(layers, experts, quota)
        self._guess: list[tuple[int, ...]] = [()] * layers

    def on_guess(self, layer: int, experts: Sequence[int]) -> None:
        self._guess[layer] = tuple(experts)

    def prefetch(self, layer: int) -> Sequence[int]:
        guess, self._guess[layer] = self._guess[layer], ()
        return guess
