"""What a policy of experts is told and asked.

A model's expert layers are counted from 0; each has a quota of slots on the device. Whoever fetches an expert asks for
the worth of those that are there: of the ones that the step does not use, the one worth least makes room, and of equal
ones the one unused for longest. On a GPU the choice itself is made on the device, in the middle of a step, by the worth
that a thread beside it wrote last: a policy may think for as long as it likes and holds nobody up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class ExpertPolicy(Protocol):
    def on_load(self, layers: int, experts: int, quota: int) -> None:
        """Prepare, once, before anything else: expert layers, experts of each, slots of each."""

    def on_phase(self, phase: str) -> None:
        """Note what the steps told from now on are: "decode", of one token (on a GPU, of up to --paged-tokens), or
        "prefill", larger ones."""

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        """Note that a step's tokens went to these experts of a layer, each named once."""

    def worth(self, layer: int) -> Sequence[float]:
        """Return the worth of every expert of the layer; one of infinite worth goes only where nothing else can."""

    def prefetch(self, layer: int) -> Sequence[int]:
        """Return the experts of the layer to bring in, the most wanted first, though no step has asked for them."""


@runtime_checkable
class GuessingPolicy(ExpertPolicy, Protocol):
    """A policy that wants to be told what the next layer's router makes of this layer's state."""

    def on_guess(self, layer: int, experts: Sequence[int]) -> None: ...
