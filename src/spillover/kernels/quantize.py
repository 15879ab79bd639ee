"""Quantisation of weights to codes: scales and rounding, with or without statistics of the inputs, on any device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels import native

E4M3_MAX = 448.0
DAMPING = 0.01  # share of the mean diagonal of a sum of x xT that is added to its diagonal
SHRINKS = 24  # number of scales tried for a group, from the one that clips nothing down to LEAST times it
LEAST = 0.6
BLOCK = 128  # columns rounded between two updates of all later columns; at most kBlock of native/quantize.cpp
_NUMBERS = 1 << 18  # weights that the search for scales processes at a time
_LEAST_SCALES = {torch.float16: 2.0**-24}  # by type: the smallest number above zero, for groups of zeros; others 1e-12
_LANES = 16  # most floats that the native search loads at once
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of their numbers in native/quantize.cpp


@dataclass(frozen=True)
class Quantized:
    """A matrix [N, K] as codes times scales."""

    codes: Tensor  # [N, K] int8, or float8_e4m3fn
    scales: Tensor  # [N, K / group]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`; computed in the scales' type, as compressed-tensors does."""
        rows, groups = self.scales.shape
        wide = self.codes.to(self.scales.dtype).view(rows, groups, -1)
        return (wide * self.scales.unsqueeze(-1)).view(rows, -1).to(dtype)


def round_to_int(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Quantized:
    """Round each weight [N, K] to the nearest code, with scales of `dtype`, one per `group` columns, each the one with
    the least squared error of those tried."""
    weight = weight.float()
    scales = int_scales(weight, bits, group, dtype)
    wide = scales.float().repeat_interleave(group, 1)
    return Quantized(_codes(weight, wide, bits).to(torch.int8), scales)


def round_to_fp8(weight: Tensor, dtype: torch.dtype) -> Quantized:
    """Round each weight [N, K] to the nearest e4m3 value; scales [N, 1] of `dtype` put a row's largest near 448."""
    weight = weight.float()
    scales = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).clamp(min=_least_scale(dtype)).to(dtype)
    values = (weight / scales.float()).clamp(-E4M3_MAX, E4M3_MAX)
    return Quantized(values.to(torch.float8_e4m3fn), scales)


def int_scales(weight: Tensor, bits: int, group: int, dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """Return the scales [N, K / group] that round weight [N, K] with the least squared error, in which column k counts
    `importance[k]` times."""
    library = native.library() if weight.device.type == "cpu" and group % _LANES == 0 else None
    if library is not None:
        return _native_scales(library, weight.float().contiguous(), bits, group, dtype, importance)
    rows, columns = weight.shape
    if rows * columns > _NUMBERS and rows > 1:
        step = max(1, _NUMBERS // columns)
        return torch.cat([int_scales(weight[start : start + step], bits, group, dtype, importance)
                          for start in range(0, rows, step)])
    values = weight.float().view(rows, -1, group)
    weights = None if importance is None else importance.float().view(1, -1, group)
    top = 2 ** (bits - 1) - 1
    full = values.abs().amax(-1, keepdim=True).clamp(min=_least_scale(dtype) * top) / top  # [N, groups, 1]
    best, least = full.to(dtype), torch.full_like(full, torch.inf)
    for step in range(SHRINKS):
        scales = (full * _shrink(step)).to(dtype)
        wide = scales.float()
        error = (_codes(values, wide, bits) * wide - values).square_()
        total = (error if weights is None else error * weights).sum(-1, keepdim=True)
        better = total < least
        best, least = torch.where(better, scales, best), torch.where(better, total, least)
    chosen: Tensor = best.squeeze(-1)
    return chosen


def _least_scale(dtype: torch.dtype) -> float:
    return _LEAST_SCALES.get(dtype, 1e-12)


def _shrink(step: int) -> float:
    return 1 - step * (1 - LEAST) / (SHRINKS - 1)


def _native_scales(library: ctypes.CDLL, weight: Tensor, bits: int, group: int, dtype: torch.dtype,
                   importance: Tensor | None) -> Tensor:
    """Return the same scales, or others of equal error: sums are added up in another order."""
    rows, columns = weight.shape
    scales = torch.empty(rows, columns // group)
    shrinks = torch.tensor([_shrink(step) for step in range(SHRINKS)])
    counts = None if importance is None else importance.float().contiguous()
    library.int_scales(weight.data_ptr(), rows, columns, group, bits, _SCALE_TYPES.index(dtype), _least_scale(dtype),
                       shrinks.data_ptr(), SHRINKS, native.pointer(counts), scales.data_ptr())
    return scales.to(dtype)


@dataclass(frozen=True)
class InputStats:
    """Statistics of the inputs x [K] of a weight, from the sum of x xT over the inputs of a calibration."""

    order: Tensor  # [K]: indices of the columns, those with the largest inputs first
    importance: Tensor  # [K]: diagonal of the damped sum
    factor: Tensor  # [K, K]: upper triangular U, where UT U is the inverse of the damped sum in `order`

    @staticmethod
    def of(total: Tensor) -> InputStats:
        """Compute the statistics from the sum, of which only the upper triangle is read."""
        damped = total.to(torch.float64, copy=True).triu_()
        damped += damped.triu(1).T
        mean = damped.diagonal().mean().item()
        damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
        importance = damped.diagonal().clone()
        order = importance.argsort(descending=True, stable=True)
        # With the order reversed on both sides, the sum is L LT, and U is the inverse of L, reversed again.
        backward = order.flip(0)
        lower = torch.linalg.cholesky(damped[backward][:, backward])
        del damped  # memory for four matrices of this size is planned
        unit = torch.eye(len(order), dtype=lower.dtype, device=lower.device)
        factor: Tensor = torch.linalg.solve_triangular(lower, unit, upper=False).flip(0, 1)
        return InputStats(order, importance.float(), factor.float())


def gptq_round(weight: Tensor, stats: InputStats, bits: int, group: int, dtype: torch.dtype) -> Quantized:
    """Round weight [N, K] column by column, those with the largest inputs first, and after each change the remaining
    columns to make up for its error: GPTQ in activation order, with scales for groups of adjacent columns."""
    weight = weight.float()
    scales = int_scales(weight, bits, group, dtype, stats.importance)
    remaining, factor, columns = weight.index_select(1, stats.order), stats.factor.contiguous(), weight.shape[1]
    codes, wide = torch.empty(weight.shape, dtype=torch.int8, device=weight.device), scales.float()
    for start in range(0, columns, BLOCK):
        end = min(columns, start + BLOCK)
        errors = _round_columns(remaining, factor, wide, stats.order, start, end, bits, codes)
        remaining[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return Quantized(codes, scales)


def _round_columns(remaining: Tensor, factor: Tensor, scales: Tensor, order: Tensor, start: int, end: int, bits: int,
                   codes: Tensor) -> Tensor:
    """Round these columns of `remaining` [N, K] into `codes`, changing those that follow; return their errors [N, end -
    start]. `scales` is float32. Native kernels give the same bits."""
    group = remaining.shape[1] // scales.shape[1]
    library = native.library() if remaining.device.type == "cpu" else None
    if library is not None:
        errors = remaining.new_empty(len(remaining), end - start)
        library.round_columns(remaining.data_ptr(), factor.data_ptr(), scales.data_ptr(), order.data_ptr(),
                              *remaining.shape, start, end, group, bits, codes.data_ptr(), errors.data_ptr())
        return errors
    block, inverse = remaining[:, start:end], factor[start:end, start:end]
    errors, wide = torch.empty_like(block), scales[:, order[start:end] // group]
    for column in range(end - start):
        value, scale = block[:, column], wide[:, column]
        code = _codes(value, scale, bits)
        codes[:, order[start + column]] = code.to(torch.int8)
        errors[:, column] = (value - code * scale) / inverse[column, column]
        block[:, column + 1 :] -= errors[:, column, None] * inverse[column, column + 1 :]
    return errors


def _codes(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the nearest codes, as floats."""
    top = 2 ** (bits - 1)
    return (weight / scales).round_().clamp_(-top, top - 1)
