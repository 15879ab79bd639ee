"""What a policy of experts is told and asked, and how one is found by its name.

A model's expert layers are counted from 0; each has a quota of slots on the device. Whoever fetches an expert asks for
the worth of those that are there: of the ones that the step does not use, the one worth least makes room, and of equal
ones the one unused for longest. On a GPU the choice itself is made on the device, in the middle of a step, by the worth
that a thread beside it wrote last: a policy may think for as long as it likes and holds nobody up.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from spillover.errors import SpilloverError

NAMES = ("static", "lru", "lfru", "next-layer")


class ExpertPolicy(Protocol):
    def on_load(self, layers: int, experts: int, quota: int) -> None:
        """Once, before anything else: expert layers, experts of each, slots of each."""

    def on_phase(self, phase: str) -> None:
        """What the steps told from now on are: "decode", of one token (on a GPU, of up to --paged-tokens), or
        "prefill", larger ones."""

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        """A step's tokens went to these experts of a layer, each named once."""

    def worth(self, layer: int) -> Sequence[float]:
        """Of every expert of the layer; infinity is never evicted. At most quota less what a step uses may be that."""

    def prefetch(self, layer: int) -> Sequence[int]:
        """Experts of the layer to bring in, the most wanted first, though no step has asked for them."""


@runtime_checkable
class GuessingPolicy(ExpertPolicy, Protocol):
    """A policy that wants to be told what the next layer's router makes of this layer's state."""

    def on_guess(self, layer: int, experts: Sequence[int]) -> None: ...


def expert_policy(name: str) -> ExpertPolicy:
    """By its flag: one of NAMES, or module:Class of one's own."""
    from spillover.memory.policies.experts.lfru import LFRU
    from spillover.memory.policies.experts.lru import LRUQuota
    from spillover.memory.policies.experts.next_layer import NextLayer
    from spillover.memory.policies.experts.static import Static

    known: dict[str, type[ExpertPolicy]] = {"static": Static, "lru": LRUQuota, "lfru": LFRU, "next-layer": NextLayer}
    if name in known:
        return known[name]()
    module, colon, cls = name.partition(":")
    if not colon:
        raise SpilloverError(f"--policy takes {', '.join(NAMES)} or module:Class; got '{name}'")
    try:
        policy = getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SpilloverError(f"--policy {name} could not be made: {error}") from error
    for method in ("on_load", "on_phase", "on_route", "worth", "prefetch"):
        if not callable(getattr(policy, method, None)):
            raise SpilloverError(f"--policy {name}: the class has no method {method}")
    return policy  # type: ignore[no-any-return]
