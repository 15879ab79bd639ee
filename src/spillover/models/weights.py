"""How a model gets at its weights while it computes.

Weights come in parts, "embed", "layers.0" and so on, "head". A model enters a part when it computes with it and leaves
it after: that is where weights which are not resident can be fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from spillover.kernels.coded import PanelWeight
from spillover.kernels.linear import FixedWeight, PackedWeight
from spillover.models.weight_specs import WeightSpec

# Name to weight. A linear or embedding is a kernels.linear.Weight, a stack of experts is indexed by expert id and gives
# one, a norm, bias or sink is a plain tensor.
PartWeights = Mapping[str, Any]


@dataclass(frozen=True)
class PackedExperts:
    """A stack of packed linears; one expert is a view of it."""

    panels: Tensor  # [experts, panels, in, lanes]
    out_features: int

    def __getitem__(self, expert: int) -> PackedWeight:
        return PackedWeight(self.panels[expert], self.out_features)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes


class Weights(Protocol):
    def part(self, name: str) -> AbstractContextManager[PartWeights]: ...


PAGED = "experts"  # in a part whose experts are not all on the device: whoever knows where they are, one of these two


class FetchedExperts(Protocol):
    """A layer's experts on the CPU, brought or computed where they are, one after another."""

    def routed(self, x: Tensor, ids: Tensor) -> None:
        """Before any is asked for: what the router saw [T, H] and chose [T, k]."""

    def expert(self, index: int) -> PartWeights:
        """One of them as stacks of one, good until the next is asked for."""


class PagedExperts(Protocol):
    """A layer's experts on a CUDA device, all that a step asks for at once."""

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                fixed: bool) -> Tensor:
        """As kernels.moe.mixture."""


class ResidentWeights:
    """Every part stays on the device."""

    def __init__(self, parts: Mapping[str, PartWeights]) -> None:
        self.parts = dict(parts)
        self.bound: dict[Any, Any] = {}  # what was made of where they lie; forgotten when they move
        self._contexts: dict[str, AbstractContextManager[PartWeights]] = {
            name: nullcontext(weights) for name, weights in parts.items()
        }

    def part(self, name: str) -> AbstractContextManager[PartWeights]:
        return self._contexts[name]

    def move(self, device: torch.device) -> None:
        """Every weight to another device, part by part, so that no second copy of them all is ever held.

        On the host they lie in pinned memory where there is a device to come back from, so that the way back is short.
        """
        self.bound.clear()
        for name, weights in self.parts.items():
            part = {key: _moved(weight, device) for key, weight in weights.items()}
            self.parts[name] = part
            self._contexts[name] = nullcontext(part)

    @property
    def unpadded(self) -> int:
        """Rows of the largest step that may not be padded."""
        return 0

    def epoch(self, rows: int) -> int | None:
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


def in_fixed_order(part: PartWeights, specs: Iterable[WeightSpec]) -> dict[str, Any]:
    """Weights on a CUDA device whose products are summed up in one order: see kernels.linear.FixedWeight."""
    linears = {spec.name for spec in specs if spec.packable and len(spec.shape) == 2}
    return {name: FixedWeight(weight) if name in linears and isinstance(weight, torch.Tensor) else weight
            for name, weight in part.items()}


def _moved(weight: Any, device: torch.device) -> Any:
    if isinstance(weight, PanelWeight | PackedExperts):
        return replace(weight, panels=_moved(weight.panels, device))
    if isinstance(weight, FixedWeight):
        return replace(weight, data=_moved(weight.data, device))
    if device.type != "cpu" or weight.device.type == "cpu":
        return weight.to(device)
    try:
        host = torch.empty_like(weight, device=device, pin_memory=True)
    except RuntimeError:  # no more may be pinned
        host = torch.empty_like(weight, device=device)
    return host.copy_(weight)
