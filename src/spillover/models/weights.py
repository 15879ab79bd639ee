"""Access to a model's weights while it computes.

Weights are divided into parts: "embed", "layers.0" and so on, "head". A model enters a part's context to compute with
it and leaves it afterwards; entering is where weights that are not resident are fetched.
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
    """The weights that a part may have; which ones depends on the model."""

    embedding: Linear
    norm: Tensor
    lm_head: Linear


class Weights(Protocol):
    def part(self, name: str) -> AbstractContextManager[PartWeights]: ...


class ResidentWeights:
    """Weights that all stay on the device, except paged experts."""

    def __init__(self, parts: Mapping[str, Mapping[str, Weight]],
                 experts: Mapping[str, LayerExperts] | None = None) -> None:
        """Hold the weights. `experts`: the experts of parts where not all of them are resident, by part."""
        self.parts = dict(parts)
        self._experts = experts or {}
        self._contexts = {name: nullcontext(self.bind_part(name)) for name in parts}

    def part(self, name: str) -> AbstractContextManager[PartWeights]:
        return self._contexts[name]

    def bind_part(self, name: str, streamed: Mapping[str, Weight] | None = None) -> PartWeights:
        """Return a part for the model; `streamed`: those of its weights that are not resident."""
        part = cast(PartWeights, {**self.parts[name], **(streamed or {})})
        if name in self._experts:
            part["experts"] = self._experts[name]
        elif "experts.down" in part:
            part["experts"] = ResidentExperts(*expert_stacks(part))
        return part

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None:
        """Replace every tensor by the result of `copy`, part by part, to avoid a second copy of all weights at once.
        `asleep`: whether the copies are on the host, where nothing computes with them."""
        for name, weights in self.parts.items():
            self.parts[name] = {key: mapped(weight, copy) for key, weight in weights.items()}
            self._contexts[name] = nullcontext(self.bind_part(name))

    @property
    def nbytes(self) -> int:
        return sum(int(weight.nbytes) for weights in self.parts.values() for weight in weights.values())


def split_experts(weights: Mapping[str, Weight]) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Return the weights of a part that every token uses, and its stacks of experts."""
    experts = {name: weight for name, weight in weights.items() if is_expert(name)}
    return {name: weight for name, weight in weights.items() if name not in experts}, experts


def one_expert_of(stacks: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the stacks with only their first expert, as stacks of one."""
    return {name: mapped(weight, lambda tensor: tensor[:1]) for name, weight in stacks.items()}
