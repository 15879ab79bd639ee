"""The tensors of a weight as names, types and shapes. Plain arithmetic: the planner counts with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "int8": 1, "uint8": 1}
COMPUTE_TYPES = ("float32", "bfloat16", "float16")  # that an engine computes in
ALIGNMENT = 256  # bytes, of every tensor in a record (see records), and of records beside each other
CHUNK = 1 << 22  # numbers that are dequantised at a time
FLOATING = "floating"  # the type of a checkpoint tensor that may hold any floating type of two bytes or more


def aligned(nbytes: int) -> int:
    """Return the bytes rounded up to whole ALIGNMENTs."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Field:
    """One tensor: of a weight as it is kept, or of a checkpoint."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    squeezed: bool = False  # a checkpoint may have it with more or fewer dimensions of 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class LinearShape:
    """A [out, in] matrix, which may be several fused along their rows."""

    output_sizes: tuple[int, ...]  # rows of each; a format may quantise each by itself
    in_features: int

    def row_chunks(self) -> Iterator[tuple[int, slice]]:
        """Yield (which of the fused matrices, rows) of what is dequantised at a time, so that little is held besides
        the result."""
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
        """Return whether it is two matrices of one size: a gate, and what it is multiplied with."""
        return len(self.output_sizes) == 2 and self.output_sizes[0] == self.output_sizes[1]
