"""The interface of an expert policy.

A model's expert layers are counted from 0; each has a quota of slots on the device. When an expert is fetched and no
slot is free, the resident expert of least worth that the step does not use is evicted, and of equal ones the least
recently used. On a GPU the device itself makes the choice, in the middle of a step, by the worths that a separate
thread wrote last, so a slow policy never delays a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class ExpertPolicy(Protocol):
    def on_load(self, layers: int, experts: int, quota: int) -> None:
        """Prepare, called once before any other method: number of expert layers, experts and slots per layer."""

    def on_phase(self, phase: str) -> None:
        """Note the phase of the steps reported from now on: "decode" for steps of one token (on a GPU, of up to
        --paged-tokens), or "prefill" for larger ones."""

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        """Note that a step's tokens were routed to these experts of a layer, each listed once."""

    def worth(self, layer: int) -> Sequence[float]:
        """Return the worth of every expert of the layer; infinite worth: evicted only if no other expert can be."""

    def prefetch(self, layer: int) -> Sequence[int]:
        """Return experts of the layer to fetch before any step needs them, most wanted first."""


@runtime_checkable
class GuessingPolicy(ExpertPolicy, Protocol):
    """A policy that receives the choice of the next layer's router for this layer's hidden state."""

    def on_guess(self, layer: int, experts: Sequence[int]) -> None: ...
