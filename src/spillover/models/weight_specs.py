"""What weights a model has, and where a checkpoint keeps them. Plain arithmetic: the planner counts with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from spillover.kernels.extents import CODE_BLOCK, CODE_BYTES, CODE_PANEL

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
    code_bits: int = 0  # of the codes that the file has and loading keeps; 0: it is made numbers

    def nbytes(self, itemsize: int) -> int:
        """Bytes it takes where the engine's numbers have `itemsize` bytes."""
        if self.code_bits:
            return math.prod(self.shape) * CODE_BYTES[self.code_bits] // (CODE_BLOCK * CODE_PANEL)
        return math.prod(self.shape) * (itemsize if self.dtype is None else _STORED[self.dtype])


WeightSpecs = dict[str, list[WeightSpec]]  # by part


def layer_part(layer: int) -> str:
    return f"layers.{layer}"


def part_nbytes(specs: Iterable[WeightSpec], itemsize: int) -> int:
    return sum(spec.nbytes(itemsize) for spec in specs)


def in_codes(specs: WeightSpecs, code_bits: Mapping[str, int]) -> WeightSpecs:
    """The same, but linears whose tensors a checkpoint has in codes of one kind stay in them. `code_bits`: of its
    tensors that are in codes."""
    return {part: [_in_codes(spec, code_bits) for spec in listed] for part, listed in specs.items()}


def _in_codes(spec: WeightSpec, code_bits: Mapping[str, int]) -> WeightSpec:
    if not spec.packable or len(spec.shape) != 2 or len(spec.sources) != 1 or spec.sources[0].transposed:
        return spec
    kinds = {code_bits.get(name, 0) for name in spec.sources[0].names}
    return replace(spec, code_bits=kinds.pop()) if len(kinds) == 1 else spec
