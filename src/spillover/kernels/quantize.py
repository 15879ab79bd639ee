"""How weights become codes: scales and rounding, plain or with what is known of the inputs. Torch alone, any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
DAMPING = 0.01  # of the Hessian's mean diagonal, added to every entry of it
SHRINKS = 24  # scales tried for a group, from the one that clips nothing down to `LEAST` of it
LEAST = 0.6
BLOCK = 128  # columns between two updates of all columns that follow
_NUMBERS = 1 << 18  # weights that a search for scales looks at together
_TINY = 1e-12  # a scale of a group of zeros


@dataclass(frozen=True)
class Quantized:
    """A matrix [N, K] as codes times scales."""

    codes: Tensor  # [N, K] int8, or float8_e4m3fn
    scales: Tensor  # [N, K / group]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Multiply in the scales' type, as compressed-tensors does."""
        rows, groups = self.scales.shape
        wide = self.codes.to(self.scales.dtype).view(rows, groups, -1)
        return (wide * self.scales.unsqueeze(-1)).view(rows, -1).to(dtype)


def round_to_int(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Quantized:
    """Round each weight [N, K] to the nearest code; scales of `dtype`, one a `group` columns, each the best of those
    tried for the squared error."""
    weight = weight.float()
    scales = int_scales(weight, bits, group, dtype)
    wide = scales.float().repeat_interleave(group, 1)
    return Quantized(_codes(weight, wide, bits).to(torch.int8), scales)


def round_to_fp8(weight: Tensor, dtype: torch.dtype) -> Quantized:
    """Round each weight [N, K] to the nearest e4m3 value; scales [N, 1] of `dtype`, the largest of a row near 448."""
    weight = weight.float()
    scales = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).clamp(min=_TINY).to(dtype)
    values = (weight / scales.float()).clamp(-E4M3_MAX, E4M3_MAX)
    return Quantized(values.to(torch.float8_e4m3fn), scales)


def int_scales(weight: Tensor, bits: int, group: int, dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """Choose scales [N, K / group] for weight [N, K], the least squared error of rounding, where column k counts
    `importance[k]` times."""
    rows, columns = weight.shape
    if rows * columns > _NUMBERS and rows > 1:
        step = max(1, _NUMBERS // columns)
        return torch.cat([int_scales(weight[start : start + step], bits, group, dtype, importance)
                          for start in range(0, rows, step)])
    values = weight.float().view(rows, -1, group)
    weights = None if importance is None else importance.float().view(1, -1, group)
    top = 2 ** (bits - 1) - 1
    full = values.abs().amax(-1, keepdim=True).clamp(min=_TINY * top) / top  # [N, groups, 1]
    best, least = full.to(dtype), torch.full_like(full, torch.inf)
    for step in range(SHRINKS):
        scales = (full * (1 - step * (1 - LEAST) / (SHRINKS - 1))).to(dtype)
        wide = scales.float()
        error = (_codes(values, wide, bits) * wide - values).square_()
        total = (error if weights is None else error * weights).sum(-1, keepdim=True)
        better = total < least
        best, least = torch.where(better, scales, best), torch.where(better, total, least)
    chosen: Tensor = best.squeeze(-1)
    return chosen


def compensate(weight: Tensor, factor: Tensor, bits: int, group: int, dtype: torch.dtype) -> Quantized:
    """Round weight [N, K] column after column, each time changing the columns that follow so that outputs stay near:
    GPTQ, with `factor` [K, K] as `inverse_factor` makes it."""
    weight = weight.float().clone()
    rows, columns = weight.shape
    importance = factor.diagonal().reciprocal().square()
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=dtype, device=weight.device)
    width = max(group, BLOCK // group * group)
    for start in range(0, columns, width):
        end = min(columns, start + width)
        block, inverse = weight[:, start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for column in range(end - start):
            place = start + column
            if place % group == 0:
                here = slice(column, column + group)
                scales[:, place // group] = int_scales(block[:, here], bits, group, dtype,
                                                       importance[place : place + group])[:, 0]
                scale = scales[:, place // group].float()
            value = block[:, column]
            code = _codes(value, scale, bits)
            codes[:, place] = code.to(torch.int8)
            error = (value - code * scale) / inverse[column, column]
            block[:, column:] -= error[:, None] * inverse[column, column:]
            errors[:, column] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    return Quantized(codes, scales)


def inverse_factor(hessian: Tensor) -> Tensor:
    """Factor the inverse of a damped sum of x xT [K, K] over a weight's inputs x -> upper U, the inverse being UT U."""
    damped = hessian.to(torch.float64, copy=True)
    mean = damped.diagonal().mean().item()
    damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _codes(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the nearest codes, in floats."""
    top = 2 ** (bits - 1)
    return (weight / scales).round_().clamp_(-top, top - 1)
