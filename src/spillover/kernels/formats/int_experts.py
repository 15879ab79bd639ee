"""Experts of integers in groups, as a CUDA device and the host's cores multiply with them: see cuda/mixture.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.grouped_gemm import GroupedGemm, invariant_tiles
from spillover.kernels.formats.grouped_int import GroupedInt

STEP = 128  # the number of columns must be a multiple of this
GROUPS = (32, 64, 128)  # columns of a kept group; longer groups are kept as several
FIRST_CODE = 3  # first FORMAT in kernels/triton/moe/moe_product.py: 4 bits by groups, then 8 bits
ZERO = 0xFF  # mask of the zero in a group's word; the other bits are those of its float32 scale
HOST_CODE = 5  # likewise, in native/moe/mixture.h


@dataclass(frozen=True)
class IntExperts(WeightFormat):
    """A format: codes as in `base`, uint8 [N, K * bits / 8], and a word for every group, int32 [N, groups].

    Scales of float16 and bfloat16 are exact; those of float32 are rounded to 16 significant bits.
    """

    base: GroupedInt
    quant_method = "int_experts"

    @classmethod
    def serves(cls, base: GroupedInt, shape: LinearShape) -> bool:
        """Return whether stacks of such linears can be kept in this format."""
        group = base.group or shape.in_features
        return (not base.ordered and shape.in_features % STEP == 0 == shape.in_features % group
                and shape.out_features % STEP == 0 and (group in GROUPS or group % STEP == 0))

    @property
    def group(self) -> int:
        return self.base.group if self.base.group in GROUPS else STEP

    @property
    def _index(self) -> int:
        return len(GROUPS) * (self.base.bits == 8) + GROUPS.index(self.group)

    @cached_property
    def experts(self) -> GroupedGemm:
        tiles = invariant_tiles(STEP)
        return GroupedGemm(FIRST_CODE + self._index, None, tiles, tiles, input_dtypes={}).batch_invariant()

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        rows, columns = shape.out_features, shape.in_features
        return (Field("codes", "uint8", (rows, columns * self.base.bits // 8)),
                Field("scales", "int32", (rows, columns // self.group)))

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load(reader, shape, target))

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        if not experts:
            return self.packed_tensors(shape, self.base.dummy(shape, 0, target, random))
        stacks = tuple(torch.empty(experts, *field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                       for field in self.fields(shape, target.dtype))
        for expert in range(experts):
            for stack, made in zip(stacks, self.dummy(shape, 0, target, random), strict=True):
                stack[expert] = made
        return stacks

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made from those of `base`."""
        codes, scales, *zeros = tensors
        middle = torch.full_like(scales, 1 << (self.base.bits - 1), dtype=torch.int32)
        words = words_of(scales, zeros[0] if zeros else middle)
        return codes, words.repeat_interleave(shape.in_features // self.group // words.shape[1], 1)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        codes, words = w.tensors
        weight_format = GroupedInt(self.base.bits, self.group, "float32", zeros=True)
        scales = (words & ~ZERO).view(torch.float32)
        tensors = codes, scales, (words & ZERO).to(torch.uint8)
        return weight_format.dequantize(Linear(weight_format, w.shape, tensors), dtype)

    def host_code(self, dtype: torch.dtype) -> int | None:
        return HOST_CODE + self._index


def words_of(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return an int32 word for each scale and zero."""
    bits = scales.float().contiguous().view(torch.int32)
    rounded = bits + (ZERO >> 1) + ((bits >> 8) & 1)  # rounds halves to even
    return (rounded & ~ZERO) | zeros.int()
