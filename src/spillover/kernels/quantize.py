"""How weights become codes: scales and rounding, plain or with what is known of the inputs. Torch alone, any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
DAMPING = 0.01  # of the mean diagonal of a sum of x xT, added to its diagonal
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


@dataclass(frozen=True)
class Inputs:
    """What is known of the inputs x [K] of a weight, from the sum of x xT over those that were seen."""

    order: Tensor  # [K]: columns, those with the largest inputs first
    importance: Tensor  # [K]: the sum's diagonal, damped
    factor: Tensor  # [K, K] upper U, where UT U is the inverse of the damped sum in that order

    @staticmethod
    def of(total: Tensor) -> Inputs:
        damped = total.to(torch.float64, copy=True)
        mean = damped.diagonal().mean().item()
        damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
        importance = damped.diagonal().clone()
        order = importance.argsort(descending=True, stable=True)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
        factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
        return Inputs(order, importance.float(), factor.float())


def compensate(weight: Tensor, inputs: Inputs, bits: int, group: int, dtype: torch.dtype) -> Quantized:
    """Round weight [N, K] column after column, those with the largest inputs first, each time changing the columns that
    follow so that outputs stay near: GPTQ in activation order, with the scales of the columns' own groups."""
    weight = weight.float()
    scales = int_scales(weight, bits, group, dtype, inputs.importance)
    wide = scales.float().repeat_interleave(group, 1)[:, inputs.order]
    rest, factor, columns = weight[:, inputs.order], inputs.factor, weight.shape[1]
    codes = torch.empty_like(rest)
    for start in range(0, columns, BLOCK):
        end = min(columns, start + BLOCK)
        block, inverse = rest[:, start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for column in range(end - start):
            value, scale = block[:, column], wide[:, start + column]
            code = _codes(value, scale, bits)
            codes[:, start + column] = code
            errors[:, column] = (value - code * scale) / inverse[column, column]
            block[:, column:] -= errors[:, column, None] * inverse[column, column:]
        rest[:, end:] -= errors @ factor[start:end, end:]
    ordered = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    ordered[:, inputs.order] = codes.to(torch.int8)
    return Quantized(ordered, scales)


def _codes(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the nearest codes, in floats."""
    top = 2 ** (bits - 1)
    return (weight / scales).round_().clamp_(-top, top - 1)
