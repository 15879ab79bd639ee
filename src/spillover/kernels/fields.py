"""The tensors of a weight as names, types and shapes. Plain arithmetic, so that the planner can use it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "int8": 1, "uint8": 1}
COMPUTE_TYPES = ("float32", "bfloat16", "float16")  # types that an engine can compute in
ALIGNMENT = 256  # alignment in bytes of each tensor in a record (see moe.records), and of adjacent records
CHUNK = 1 << 22  # number of values that are dequantised at a time
FLOATING = "floating"  # type of a checkpoint tensor that may have any floating type of two bytes or more


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Field:
    """The name, type and shape of one tensor, of a weight as it is kept or of a checkpoint."""

    name: str
    dtype: str  # torch's name of the type, or FLOATING
    shape: tuple[int, ...]
    squeezed: bool = False  # whether a checkpoint may have the tensor with more or fewer dimensions of size 1
    column_groups: bool = False  # whether it has the group of each column, for columns in activation order

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class LinearShape:
    """The shape of an [out, in] matrix, which may be several matrices fused along their rows."""

    output_sizes: tuple[int, ...]  # rows of each fused matrix; a format may quantise each separately
    in_features: int

    def row_chunks(self) -> Iterator[tuple[int, slice]]:
        """Yield (index of the fused matrix, rows) of each chunk that is dequantised at a time, so that little memory is
        needed besides the result."""
        step, start = max(1, CHUNK // max(1, self.in_features)), 0
        for index, size in enumerate(self.output_sizes):
            for first in range(start, start + size, step):
                yield index, slice(first, min(start + size, first + step))
            start += size

    @cached_property
    def out_features(self) -> int:
        return sum(self.output_sizes)

    @property
    def is_pair(self) -> bool:
        """Return whether these are two matrices of one size: a gate, and the matrix whose product it gates."""
        return len(self.output_sizes) == 2 and self.output_sizes[0] == self.output_sizes[1]
