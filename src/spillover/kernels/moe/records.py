"""Units of weights as runs of bytes: all tensors of a unit one after another, so that moving it is one copy.

A unit is the tensors of a part that are always moved together, or one expert of a layer. A record has the place of each
tensor in the run; `bind` returns the weights as views of the bytes, in any memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.fields import LinearShape, aligned
from spillover.kernels.formats.base import Linear, Weight, WeightFormat


@dataclass(frozen=True)
class Extent:
    """The place of one tensor's bytes in a record."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, run: Tensor) -> Tensor:
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return run[self.offset : end].view(self.dtype).view(self.shape)

    def stack(self, runs: Tensor) -> Tensor:
        """Return a view [n, ...] of this tensor over `runs`, the records of n experts."""
        size, inner = self.dtype.itemsize, self.shape[1:]
        strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
        return runs.view(self.dtype).as_strided(
            (runs.shape[0], *inner), (runs.stride(0) // size, *strides),
            runs.storage_offset() // size + self.offset // size,
        )


@dataclass(frozen=True)
class Entry:
    """One weight of a record."""

    name: str
    extents: tuple[Extent, ...]
    linear: tuple[WeightFormat, LinearShape] | None  # format and shape; None: the weight is a tensor

    def make(self, tensor: Callable[[Extent], Tensor]) -> Weight:
        tensors = tuple(map(tensor, self.extents))
        return tensors[0] if self.linear is None else Linear(*self.linear, tensors)


@dataclass(frozen=True)
class Record:
    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, weights: Mapping[str, Weight]) -> Record:
        """Return the layout of a record of these weights, in their order."""
        entries, end = [], 0
        for name, weight in weights.items():
            extents = []
            for data in tensors_of(weight):
                extents.append(Extent(end, tuple(data.shape), data.dtype))
                end += aligned(data.nbytes)
            linear = (weight.format, weight.shape) if isinstance(weight, Linear) else None
            entries.append(Entry(name, tuple(extents), linear))
        return cls(tuple(entries), end)

    def bind(self, run: Tensor) -> dict[str, Weight]:
        """Return views of the weights whose bytes are `run` [nbytes] uint8."""
        return {entry.name: entry.make(lambda extent: extent.view(run)) for entry in self.entries}

    def write(self, weights: Mapping[str, Weight], run: Tensor) -> None:
        _copy(weights, self.bind(run))

    def stacks(self, runs: Tensor) -> dict[str, Weight]:
        """Return views of the stacks [n, ...] over n experts, whose records are the rows of `runs` [n, nbytes]."""
        return {entry.name: entry.make(lambda extent: extent.stack(runs)) for entry in self.entries}

    def write_stacks(self, stacks: Mapping[str, Weight], runs: Tensor) -> None:
        """Write whole stacks of experts into their records, the rows of `runs` [n, nbytes]."""
        _copy(stacks, self.stacks(runs))

    def offsets(self, name: str) -> tuple[int, ...]:
        """Return the offsets of a weight's tensors; none if the record has no such weight."""
        return tuple(extent.offset for entry in self.entries if entry.name == name for extent in entry.extents)


def tensors_of(weight: Weight) -> tuple[Tensor, ...]:
    return weight.tensors if isinstance(weight, Linear) else (weight,)


def mapped(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    return weight.map(change) if isinstance(weight, Linear) else change(weight)


def _copy(weights: Mapping[str, Weight], targets: Mapping[str, Weight]) -> None:
    for name, target in targets.items():
        for into, data in zip(tensors_of(target), tensors_of(weights[name]), strict=True):
            into.copy_(data)
