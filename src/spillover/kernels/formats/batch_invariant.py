"""Any format, multiplied on a CUDA device with the same order of a row's sums for any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.grouped_gemm import GroupedGemm


@dataclass(frozen=True)
class BatchInvariant(WeightFormat):
    """A batch-invariant format, kept and loaded as `base` is."""

    base: WeightFormat
    quant_method = "batch_invariant"

    @property
    def loads_stacks(self) -> bool:  # type: ignore[override]
        return self.base.loads_stacks

    @property
    def dequantized_from(self) -> WeightFormat | None:
        return self.base.dequantized_from

    @cached_property
    def experts(self) -> GroupedGemm | None:
        return None if self.base.experts is None else self.base.experts.batch_invariant()

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return self.base.fields(shape, dtype)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.base.load(reader, shape, target)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        return self.base.dummy(shape, experts, target, random)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return self.base.dequantize(w, dtype)

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        return self.base.scratch_bytes(shape, dtype)

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        from spillover.kernels.triton.ordered_linear import ordered_linear

        return ordered_linear(x, self.base.dequantize(w, x.dtype), bias)

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        from spillover.kernels.triton.ordered_linear import ordered_linear_silu

        return ordered_linear_silu(x, self.base.dequantize(w, x.dtype), bias)

    def add_norm_linear(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, w: Linear,
                        bias: Tensor | None = None, gated: bool = False) -> tuple[Tensor, Tensor]:
        from spillover.kernels.triton.ordered_linear import add_norm_linear

        return add_norm_linear(x, residual, norm, eps, self.base.dequantize(w, x.dtype), bias, gated)

    def prepare(self, linears: Sequence[tuple[LinearShape, bool]], target: Target, most_rows: int) -> None:
        from spillover.kernels.cuda import ordered_gemm

        ordered_gemm.prepare(((shape.out_features, shape.in_features, bias, shape.is_pair) for shape, bias in linears),
                             getattr(torch, target.dtype), target.device, most_rows)

    def host_code(self, dtype: torch.dtype) -> int | None:
        return self.base.host_code(dtype)
