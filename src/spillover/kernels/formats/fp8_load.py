"""Loads FP8 linears whose checkpoint may hold some matrices in a wider type than its configuration says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Target, TensorReader
from spillover.kernels.formats.choice import OneMatrix
from spillover.kernels.formats.fp8_block import Fp8Block, quantize
from spillover.kernels.quantize import round_to_fp8

if TYPE_CHECKING:
    from spillover.kernels.formats.fp8_rows import Fp8Rows

log = logging.getLogger("spillover.kernels")


def load_or_round(base: Fp8Rows | Fp8Block, reader: TensorReader, shape: LinearShape,
                  target: Target) -> tuple[Tensor, Tensor]:
    """Read the values and scales of one linear; round a matrix that the checkpoint has in a wider type."""
    values, scales = (torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                      for field in base.fields(shape, target.dtype))
    row = scale_row = 0
    for name, rows in reader.matrices:
        one = LinearShape((rows,), shape.in_features)
        if reader.dtype(name).itemsize > 1:
            log.info("%s is not in FP8, although the checkpoint's configuration says so; it is rounded", name)
            made = _rounded(base, reader.read(Field(name, FLOATING, (rows, shape.in_features))).to(target.device))
        else:
            made = base.load(OneMatrix(reader, name, rows), one, target)
        for whole, part, first in ((values, made[0], row), (scales, made[1], scale_row)):
            whole[first : first + part.shape[0]] = part
        row, scale_row = row + rows, scale_row + made[1].shape[0]
    return values, scales


def _rounded(base: Fp8Rows | Fp8Block, weight: Tensor) -> tuple[Tensor, ...]:
    if isinstance(base, Fp8Block):
        return quantize(weight)
    made = round_to_fp8(weight, torch.float32)
    return made.codes, made.scales[:, 0]
