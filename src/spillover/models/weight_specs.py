"""What weights a model has, and where a checkpoint keeps them. Plain arithmetic: the planner counts with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # of what an engine computes in
_STORED = ITEMSIZE | {"float8_e4m3fn": 1, "uint8": 1}
ALIGNMENT = 256  # of every tensor in a record (see records), and of records beside each other


@dataclass(frozen=True)
class Source:
    """Checkpoint tensors which, concatenated along their rows, make one weight (or one expert of it)."""

    names: tuple[str, ...]  # with "{expert}" in them: one tensor an expert, to be stacked
    rows: tuple[int, ...]  # rows that each name contributes
    transposed: bool = False  # the file holds the last two dimensions the other way round

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.names[0]


@dataclass(frozen=True)
class WeightSpec:
    name: str
    shape: tuple[int, ...]  # [out, in] for a linear, [experts, out, in] for a stack of them
    sources: tuple[Source, ...]  # alternatives: the first whose tensors the checkpoint has
    dtype: str | None = None  # None: the engine's; else this one, whatever the engine computes in
    packable: bool = False  # only ever used through kernels.linear
    padding: int = 0  # of the last dimension: zeros that the file does not have and loading adds

    def nbytes(self, itemsize: int) -> int:
        """Bytes it takes where the engine's numbers have `itemsize` bytes."""
        return math.prod(self.shape) * (itemsize if self.dtype is None else _STORED[self.dtype])


WeightSpecs = dict[str, list[WeightSpec]]  # by part


def layer_part(layer: int) -> str:
    return f"layers.{layer}"


def part_nbytes(specs: Iterable[WeightSpec], itemsize: int) -> int:
    return sum(spec.nbytes(itemsize) for spec in specs)
