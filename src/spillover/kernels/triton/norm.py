"""Root-mean-square normalisation of rows after the residual sum: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.launch import NO_FUSION, pdl_options


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                 begin_early: bool = True) -> tuple[Tensor, Tensor]:
    """Add and normalise x and residual [T, D] -> (rms_norm(x + residual), x + residual)."""
    rows, width = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(residual)
    if rows:
        _add_rms_norm[(rows,)](
            x, residual, weight, normed, total, eps, x.stride(0), residual.stride(0),
            WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=_warps(width),
            **NO_FUSION, **pdl_options(x.device, begin_early),
        )
    return normed, total


def early_if_gated(rows: int, width: int) -> bool:
    """Return whether the norm before a gated product should begin early, if the product does: measured on an H200 with
    the layers of Qwen3-0.6B, Qwen3-14B and Llama-3.1-8B, in bfloat16 and, of the last, in codes."""
    return rows <= 128 or width <= 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [T, D] -> [T, D]; its rows may have any stride."""
    rows, width = x.shape
    zeros = torch.zeros(1, width, dtype=x.dtype, device=x.device).expand(rows, width)
    return add_rms_norm(x, zeros, weight, eps)[0]


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, eps, x_stride, residual_stride,
                  WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    if EARLY:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    dtype = normed_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32)  # the sum, rounded as it is stored
    tl.store(total_ptr + row * WIDTH + column, x.to(dtype), mask=inside)
    factor = tl.rsqrt(pairwise_sum((x * x).reshape(1, PADDED), 1, PADDED) / WIDTH + eps)
    tl.store(normed_ptr + row * WIDTH + column, scaled(x, factor, weight, dtype), mask=inside)


@triton.jit
def scaled(x, factor, weight, dtype: tl.constexpr):
    """Return x times the factor of its row, rounded, times the norm's weight, rounded."""
    return ((x * factor).to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def pairwise_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum each row of x [ROWS, WIDTH], neighbours first -> [ROWS]: an order that does not depend on how a kernel lays x
    out in registers."""
    for level in tl.static_range(20):
        if WIDTH >> level > 1:
            x = tl.sum(x.reshape(ROWS, WIDTH >> level >> 1, 2), 2)
    return x.reshape(ROWS)
