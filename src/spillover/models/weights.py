"""How a model gets at its weights while it computes.

Weights come in parts, "embed", "layers.0" and so on, "head". A model enters a part when it computes with it and leaves
it after: that is where weights which are not resident can be fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from spillover.kernels.batch import LayerWeights
from spillover.kernels.experts import ExpertWeights
from spillover.kernels.formats.base import Linear, Weight, moved
from spillover.kernels.records import mapped
from spillover.models.weight_specs import is_expert

PAGED: Final = "experts"  # in a part whose experts are not all on the device: whoever knows where they are


class PartWeights(LayerWeights, ExpertWeights, total=False):
    """What a part may have; which of these, its model knows."""

    embedding: Linear
    norm: Tensor
    lm_head: Linear
    router: Linear
    router_bias: Tensor
    experts: Any  # PAGED: FetchedExperts on a CPU, PagedExperts on a CUDA device


class Weights(Protocol):
    def part(self, name: str) -> AbstractContextManager[PartWeights]: ...


class FetchedExperts(Protocol):
    """A layer's experts on the CPU, brought or computed where they are, one after another."""

    def routed(self, x: Tensor, ids: Tensor) -> None:
        """Before any is asked for: what the router saw [T, H] and chose [T, k]."""

    def expert(self, index: int) -> PartWeights:
        """One of them as stacks of one, good until the next is asked for."""


class PagedExperts(Protocol):
    """A layer's experts on a CUDA device, all that a step asks for at once."""

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None) -> Tensor:
        """As kernels.moe.mixture."""


class ResidentWeights:
    """Every part stays on the device."""

    def __init__(self, parts: Mapping[str, Mapping[str, Weight]], paged: Mapping[str, object] | None = None) -> None:
        """`paged`: who has a part's experts, where they do not stay."""
        self.parts = dict(parts)
        self.paged = paged or {}
        self._contexts: dict[str, AbstractContextManager[PartWeights]] = {}
        for name in parts:
            self._contexts[name] = nullcontext(self.whole(name))

    def part(self, name: str) -> AbstractContextManager[PartWeights]:
        return self._contexts[name]

    def whole(self, name: str, passing: Mapping[str, Weight] | None = None) -> PartWeights:
        """A part as its model sees it; `passing`: weights of it that do not stay."""
        paged = {PAGED: self.paged[name]} if name in self.paged else {}
        return cast(PartWeights, {**self.parts[name], **(passing or {}), **paged})

    def move(self, device: torch.device) -> None:
        """Every weight to another device, part by part, so that no second copy of them all is ever held.

        On the host they lie in pinned memory where there is a device to come back from, so that the way back is short.
        """
        for name, weights in self.parts.items():
            self.parts[name] = {key: moved(weight, device) if isinstance(weight, Tensor) else weight.to(device)
                                for key, weight in weights.items()}
            self._contexts[name] = nullcontext(self.whole(name))

    @property
    def max_unpadded_rows(self) -> int:
        """Rows of the largest step that may not be padded."""
        return 0

    def graph_version(self, rows: int) -> int | None:
        """Under which number a CUDA graph of a step of so many rows is good, once the step has begun: another number
        means that weights lie elsewhere. None: it cannot be recorded."""
        return 0

    def begin_step(self, rows: int) -> None:
        """A step of so many rows, padding included, is about to be launched."""

    def end_step(self, rows: int) -> None:
        """A step of so many rows has ended."""

    def close(self) -> None:
        """No step will come any more."""

    @property
    def nbytes(self) -> int:
        return sum(int(weight.nbytes) for weights in self.parts.values() for weight in weights.values())


def split_experts(weights: Mapping[str, Weight]) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """(what every token goes through, the stacks of experts) of a part."""
    experts = {name: weight for name, weight in weights.items() if is_expert(name)}
    return {name: weight for name, weight in weights.items() if name not in experts}, experts


def one_expert_of(stacks: Mapping[str, Weight], index: int) -> dict[str, Weight]:
    """The stacks cut down to one expert, still stacks."""
    return {name: mapped(weight, lambda tensor: tensor[index : index + 1]) for name, weight in stacks.items()}
