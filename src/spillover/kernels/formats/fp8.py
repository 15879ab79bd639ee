"""What formats of FP8 share: values in e4m3, with float32 scales by rows (`fp8_rows.py`) or blocks (`fp8_block.py`).

A checkpoint may hold some matrices in a wider type than its configuration says: these are rounded when they are loaded.
"""

from __future__ import annotations

import logging
from abc import abstractmethod

import torch
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import DUMMY_STD, Target, TensorReader, WeightFormat
from spillover.kernels.formats.checkpoints.settings import module_of
from spillover.kernels.formats.choice import OneMatrix

log = logging.getLogger("spillover.kernels")

SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # names of a module's single scale: both multiply
BELOW_2 = 0xBF  # mask that clears the top bit of the exponent: e4m3 is then below 2 and never NaN


class Fp8Format(WeightFormat):
    """A format: values float8_e4m3fn [N, K] and float32 scales, whose shape is a subclass's."""

    activations: str  # "dynamic": rounded to FP8 by own scales; "static": by `input_scale`; "none": not rounded
    blocked: bool  # whether 128 x 128 weights share a scale; False: those of a row do
    keeps_linears = False

    @abstractmethod
    def row_scales(self, shape: LinearShape, scales: Tensor) -> Tensor:
        """Return the scales of each row, [N, blocks of K] or [N, 1]."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round a weight [N, K] to values and scales."""

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.fp8_panels import Fp8Panels

        return Fp8Panels(self, width)

    def on_cuda(self, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.fp8_cuda import Fp8Cuda

        return Fp8Cuda.of(self, shape) or self

    def dummy_tensor(self, field: Field, device: torch.device, random: torch.Generator) -> Tensor:
        return dummy_fp8(field, device, random)

    def load_or_round(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, Tensor]:
        """Read the values and scales of one linear; round a matrix that the checkpoint has in a wider type."""
        values, scales = (torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                          for field in self.fields(shape, target.dtype))
        row = scale_row = 0
        for name, rows in reader.matrices:
            one = LinearShape((rows,), shape.in_features)
            if reader.dtype(name).itemsize > 1:
                log.info("%s is not in FP8, although the checkpoint's configuration says so; it is rounded", name)
                wide = reader.read(Field(name, FLOATING, (rows, shape.in_features)))
                made: tuple[Tensor, ...] = self.quantize(wide.to(target.device))
            else:
                made = self.load(OneMatrix(reader, name, rows), one, target)
            for whole, part, first in ((values, made[0], row), (scales, made[1], scale_row)):
                whole[first : first + part.shape[0]] = part
            row, scale_row = row + rows, scale_row + made[1].shape[0]
        return values, scales


def dummy_fp8(field: Field, device: torch.device, random: torch.Generator) -> Tensor:
    """Return random values below 2, or random scales."""
    if field.name == "scales":
        made = torch.empty(field.shape, device=device)
        return made.uniform_(0.5 * DUMMY_STD, 1.5 * DUMMY_STD, generator=random)
    codes = torch.randint(0, 256, field.shape, dtype=torch.uint8, device=device, generator=random)
    return codes.bitwise_and_(BELOW_2).view(torch.float8_e4m3fn)


def read_scale(reader: TensorReader, name: str) -> Tensor:
    """Read the single scale of a matrix."""
    names = [f"{module_of(name)}.{scale}" for scale in SCALE_NAMES]
    found = next((scale for scale in names if reader.has(scale)), names[0])
    return reader.read(Field(found, FLOATING, (1,), squeezed=True)).float()
