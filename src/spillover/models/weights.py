"""How a model gets at its weights while it computes.

Weights come in parts, "embed", "layers.0" and so on, "head". A model enters a part when it computes with it and leaves
it after: that is where weights which are not resident can be fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

from torch import Tensor

from spillover.kernels.batch import LayerWeights
from spillover.kernels.formats.base import Linear, Weight
from spillover.kernels.moe.experts import ExpertWeights, expert_stacks
from spillover.kernels.moe.moe import LayerExperts, ResidentExperts
from spillover.kernels.moe.records import mapped
from spillover.models.weight_specs import is_expert


class PartWeights(LayerWeights, ExpertWeights, total=False):
    """What a part may have; which of these, its model knows."""

    embedding: Linear
    norm: Tensor
    lm_head: Linear
    router: Linear
    router_bias: Tensor
    experts: LayerExperts  # beside its stacks, where these are on the device


class Weights(Protocol):
    def part(self, name: str) -> AbstractContextManager[PartWeights]: ...


class ResidentWeights:
    """Every part stays on the device."""

    def __init__(self, parts: Mapping[str, Mapping[str, Weight]],
                 experts: Mapping[str, LayerExperts] | None = None) -> None:
        """Hold the weights. `experts`: by part, of those parts whose experts do not all stay."""
        self.parts = dict(parts)
        self._experts = experts or {}
        self._contexts = {name: nullcontext(self.whole(name)) for name in parts}

    def part(self, name: str) -> AbstractContextManager[PartWeights]:
        return self._contexts[name]

    def whole(self, name: str, passing: Mapping[str, Weight] | None = None) -> PartWeights:
        """Return a part as its model sees it; `passing`: weights of it that do not stay."""
        part = cast(PartWeights, {**self.parts[name], **(passing or {})})
        if name in self._experts:
            part["experts"] = self._experts[name]
        elif "experts.down" in part:
            part["experts"] = ResidentExperts(*expert_stacks(part))
        return part

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None:
        """Replace every tensor by its copy elsewhere, part by part, so that no second copy of them all is ever held.
        `asleep`: the copies lie on the host, and nothing computes with them."""
        for name, weights in self.parts.items():
            self.parts[name] = {key: mapped(weight, copy) for key, weight in weights.items()}
            self._contexts[name] = nullcontext(self.whole(name))

    @property
    def nbytes(self) -> int:
        return sum(int(weight.nbytes) for weights in self.parts.values() for weight in weights.values())


def split_experts(weights: Mapping[str, Weight]) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Return what every token of a part goes through, and its stacks of experts."""
    experts = {name: weight for name, weight in weights.items() if is_expert(name)}
    return {name: weight for name, weight in weights.items() if name not in experts}, experts


def one_expert_of(stacks: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the stacks cut down to one expert, still stacks."""
    return {name: mapped(weight, lambda tensor: tensor[:1]) for name, weight in stacks.items()}
