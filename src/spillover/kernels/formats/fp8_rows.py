"""FP8 weights with one scale per row, or one per matrix, which is then kept for each of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.checkpoints.settings import module_of
from spillover.kernels.formats.fp8 import SCALE_NAMES, Fp8Format, read_scale
from spillover.kernels.formats.fp8_block import FP8_TENSOR
from spillover.kernels.quantize import round_to_fp8


@dataclass(frozen=True)
class Fp8Rows(Fp8Format):
    """A format: values float8_e4m3fn [N, K] and float32 scales [N]."""

    per_row: bool = True  # whether the checkpoint has one scale per row; False: one per matrix
    activations: str = "dynamic"
    blocked = False
    quant_method = "fp8_rows"

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("values", "float8_e4m3fn", (shape.out_features, shape.in_features)),
                Field("scales", "float32", (shape.out_features,)))

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """Return the checkpoint's tensors, without the scale of a whole matrix, which has one of two names."""
        values = Field(name, "float8_e4m3fn", (rows, columns))
        scales = Field(f"{module_of(name)}.{SCALE_NAMES[0]}", FLOATING, (rows,), squeezed=True)
        return (values, scales) if self.per_row else (values,)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        values, scales = (torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                          for field in self.fields(shape, target.dtype))
        start = 0
        for name, rows in reader.matrices:
            stored = self.stored(name, rows, shape.in_features)
            values[start : start + rows] = reader.read(stored[0])
            scales[start : start + rows] = reader.read(stored[1]) if self.per_row else read_scale(reader, name)
            start += rows
        return values, scales

    def for_experts(self, names: Sequence[str]) -> WeightFormat:
        """Return the format of experts: with one scale per matrix that of blocks, which has a grouped product."""
        return self if self.per_row else FP8_TENSOR

    def row_scales(self, shape: LinearShape, scales: Tensor) -> Tensor:
        return scales[:, None]

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        made = round_to_fp8(weight, torch.float32)
        return made.codes, made.scales[:, 0]

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        values, scales = w.tensors
        return (values.float() * scales[:, None]).to(dtype)
