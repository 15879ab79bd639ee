"""NVFP4: 16 four-bit floats (E2M1) share a scale in e4m3, and a matrix has one in float32; the low nibble first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import DUMMY_STD, Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.checkpoints.settings import module_of
from spillover.kernels.formats.mxfp4 import byte_values

GROUP = 16  # values per scale


@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """A format: values uint8 [N, K / 2], scales float8_e4m3fn [N, K / 16], and one float32 number per fused matrix
    by which its scales are multiplied, or divided if `divides`."""

    divides: bool = False
    names: tuple[str, str, str] = ("weight", "weight_scale", "weight_scale_2")  # names of a module's tensors
    quant_method = "nvfp4"

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        rows, columns = shape.out_features, shape.in_features
        return (Field("values", "uint8", (rows, columns // 2)),
                Field("scales", "float8_e4m3fn", (rows, -(-columns // GROUP))),
                Field("global_scales", "float32", (len(shape.output_sizes),)))

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        values, scales, whole = (f"{module_of(name)}.{tensor}" for tensor in self.names)
        return (Field(values, "uint8", (rows, columns // 2)),
                Field(scales, "float8_e4m3fn", (rows, -(-columns // GROUP))),
                Field(whole, FLOATING, (1,), squeezed=True))

    def dummy_tensor(self, field: Field, device: torch.device, random: torch.Generator) -> Tensor:
        if field.name == "global_scales":
            return torch.full(field.shape, 1 / DUMMY_STD if self.divides else DUMMY_STD, device=device)
        if field.name == "scales":
            made = torch.empty(field.shape, device=device).uniform_(0.2, 0.6, generator=random)
            return made.to(torch.float8_e4m3fn)
        return torch.randint(0, 256, field.shape, dtype=torch.uint8, device=device, generator=random)

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.fp4_panels import Fp4Panels

        return Fp4Panels(self) if Fp4Panels.serves(shape) else self

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        for name, rows in reader.matrices:
            if shape.in_features % GROUP:
                values = self.stored(name, rows, shape.in_features)[0]
                raise reader.tensor_error(values.name,
                                          f"has {shape.in_features} columns, which are no multiple of {GROUP}")
        return super().load(reader, shape, target)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        values, scales, whole = w.tensors
        made = torch.empty(w.shape.out_features, w.shape.in_features, dtype=dtype, device=w.device)
        for index, rows in w.shape.row_chunks():
            scale = scales[rows].float() / whole[index] if self.divides else scales[rows].float() * whole[index]
            numbers = F.embedding(values[rows].int(), byte_values(w.device)).flatten(1)
            made[rows] = (numbers.view(len(scale), -1, GROUP) * scale.unsqueeze(-1)).flatten(1)
        return made
