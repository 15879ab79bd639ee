"""Unquantised weights [out, in] in the engine's compute type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import HOST_TYPES, Linear, TensorReader, WeightFormat, register
from spillover.kernels.formats.grouped_gemm import GroupedGemm, Tile, invariant_tiles, tiles


@register
@dataclass(frozen=True)
class Dense(WeightFormat):
    quant_method = "dense"
    # The fastest tiles of those tried on an H200 with the shapes of Qwen3-30B-A3B.
    experts = GroupedGemm(
        code=0, few=(Tile(1, 16, 128, 2, 4), Tile(1, 32, 256, 2, 3)), invariant=invariant_tiles(64),
        many=tiles((16, 128, 32, 4, 4, 64, 4), (32, 64, 32, 4, 4, 64, 4), (64, 64, 64, 4, 3, 128, 4),
                   (128, 64, 64, 8, 3, 128, 8)),
    )

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("weight", dtype, (shape.out_features, shape.in_features)),)

    def matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Tensor:
        """Read one matrix [rows, columns], in any floating type."""
        (stored,) = self.stored(name, rows, columns)
        return self.read(reader, stored)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return w.tensors[0]

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        if x.is_cuda and x.shape[0] == 1:
            from spillover.kernels.triton.gemv import gemv

            return gemv(x, w.tensors[0], bias)
        return F.linear(x, w.tensors[0], bias)

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] == 1:
            from spillover.kernels.triton.gemv import gemv_silu

            return gemv_silu(x, w.tensors[0], bias)
        return super().linear_silu(x, w, bias)

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        return 0

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.packed import Packed

        return Packed(width, self)

    def host_code(self, dtype: torch.dtype) -> int | None:
        return HOST_TYPES.index(dtype)


@dataclass(frozen=True)
class Embedding(Dense):
    """An embedding, whose rows are only looked up."""

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        return self

    def batch_invariant(self) -> WeightFormat:
        return self


DENSE = Dense()
EMBEDDING = Embedding()
