"""Units of weights as runs of bytes: all tensors of a unit one after another, so that moving it is one copy.

A unit is the tensors of a part that always travel together, or one expert of a layer. A record says where each tensor
lies in the run; `bind` makes the weights out of the bytes wherever they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spillover.kernels.coded import CodedWeight
from spillover.kernels.linear import FixedWeight, PackedWeight
from spillover.models.weight_specs import ALIGNMENT
from spillover.models.weights import PackedExperts, PartWeights


@dataclass(frozen=True)
class Field:
    """One tensor of a record, and what is to be made of it."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str = "tensor"  # "tensor" | "packed" | "coded" | "packed-experts" | "fixed"
    rows: int = 0  # of a packed weight

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bind(self, run: Tensor) -> Any:
        data = run[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)
        return self.dress(data)

    def dress(self, data: Tensor) -> Any:
        if self.form == "packed":
            return PackedWeight(data, self.rows)
        if self.form == "coded":
            return CodedWeight(data, self.rows)
        if self.form == "packed-experts":
            return PackedExperts(data, self.rows)
        return FixedWeight(data) if self.form == "fixed" else data


@dataclass(frozen=True)
class Record:
    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, weights: PartWeights) -> Record:
        """As these weights need it, in their order."""
        fields, end = [], 0
        for name, weight in weights.items():
            data, form, rows = _undressed(weight)
            fields.append(Field(name, end, tuple(data.shape), data.dtype, form, rows))
            end += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), end)

    def bind(self, run: Tensor) -> dict[str, Any]:
        """The weights whose bytes lie in `run` [nbytes] uint8."""
        return {field.name: field.bind(run) for field in self.fields}

    def write(self, weights: PartWeights, run: Tensor) -> None:
        for field in self.fields:
            data, _, _ = _undressed(weights[field.name])
            run[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape).copy_(data)

    def stacks(self, runs: Tensor) -> dict[str, Any]:
        """Of records of one expert each, one a row of `runs` [n, nbytes]: the stacks [n, ...] over all of them."""
        stacked = {}
        for field in self.fields:
            size, inner = field.dtype.itemsize, field.shape[1:]
            strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
            data = runs.view(field.dtype).as_strided(
                (runs.shape[0], *inner), (runs.stride(0) // size, *strides),
                runs.storage_offset() // size + field.offset // size,
            )
            stacked[field.name] = field.dress(data)
        return stacked

    def write_stacks(self, stacks: PartWeights, runs: Tensor) -> None:
        """Whole stacks of experts into records [n, nbytes] of one each."""
        for name, target in self.stacks(runs).items():
            _undressed(target)[0].copy_(_undressed(stacks[name])[0])


def split_experts(weights: PartWeights) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what every token goes through, the stacks of experts) of a part."""
    experts = {name: weight for name, weight in weights.items() if is_expert(name)}
    return {name: weight for name, weight in weights.items() if name not in experts}, experts


def is_expert(name: str) -> bool:
    return name.startswith("experts.")


def one_expert_of(stacks: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The stacks cut down to one expert, still stacks."""
    return {name: PackedExperts(weight.panels[index : index + 1], weight.out_features)
            if isinstance(weight, PackedExperts) else weight[index : index + 1] for name, weight in stacks.items()}


def _undressed(weight: Any) -> tuple[Tensor, str, int]:
    if isinstance(weight, PackedWeight):
        return weight.panels, "packed", weight.out_features
    if isinstance(weight, CodedWeight):
        return weight.panels, "coded", weight.out_features
    if isinstance(weight, PackedExperts):
        return weight.panels, "packed-experts", weight.out_features
    if isinstance(weight, FixedWeight):
        return weight.data, "fixed", 0
    return weight, "tensor", 0
