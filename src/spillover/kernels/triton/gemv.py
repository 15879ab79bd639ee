"""Products of a weight with a single row: the weight is read once, at the bandwidth of the memory."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.launch import pdl_options

CHANNELS = {4: 7, 8: 4}  # by output channels per program: number of such programs that share a multiprocessor
STEP = 1024  # columns of the inner dimension per iteration
WARPS = 4


def gemv(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [1, K] by w [N, K], with bias [N] -> [1, N]. Sums in float32, in one fixed order."""
    return _run(x, w, bias, w.shape[0], gated=False)


def gemv_silu(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [1, K] by w [2I, K], the gate's rows first -> silu(gate) * up [1, I]."""
    return _run(x, w, bias, w.shape[0] // 2, gated=True)


def _run(x: Tensor, w: Tensor, bias: Tensor | None, channels: int, gated: bool) -> Tensor:
    inner = x.shape[1]
    out = torch.empty(1, channels, dtype=x.dtype, device=x.device)
    each = 4 if gated else _channels(channels, x.device)
    _gemv[(triton.cdiv(channels, each),)](
        x, w, w if bias is None else bias, out, channels, inner, w.stride(0),
        CHANNELS=each, STEP=STEP, EVEN=inner % STEP == 0, BIAS=bias is not None, GATED=gated,
        num_warps=WARPS, num_stages=4, **pdl_options(x.device),
    )
    return out


@cache
def _channels(channels: int, device: torch.device) -> int:
    """Return the channels per program with which the last round of programs leaves the fewest multiprocessors idle."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def filled(each: int) -> float:
        rounds = channels / each / (processors * CHANNELS[each])
        return 1.0 if rounds <= 1 else rounds / math.ceil(rounds)

    return max(CHANNELS, key=filled)  # the first of equal ones


@triton.jit
def _gemv(x_ptr, w_ptr, bias_ptr, out_ptr, channels, inner, w_stride, CHANNELS: tl.constexpr, STEP: tl.constexpr,
          EVEN: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = n < channels
    k = tl.arange(0, STEP)
    row = w_ptr + tl.where(real, n, 0).to(tl.int64)[:, None] * w_stride + k[None, :]
    other = row + channels.to(tl.int64) * w_stride  # rows of the second half (up)
    if EARLY:
        gdc_launch_dependents()
    # The first weights are loaded while the kernel that computes x still runs.
    w = _part(row, 0, k, inner, EVEN)
    if GATED:
        u = _part(other, 0, k, inner, EVEN)
    if EARLY:
        gdc_wait()
    # The accumulator is as wide as the tile, so that threads need not communicate within the loop.
    x = _part(x_ptr + k[None, :], 0, k, inner, EVEN).to(tl.float32)
    total = w.to(tl.float32) * x
    if GATED:
        up = u.to(tl.float32) * x
    for start in range(STEP, inner, STEP):
        x = _part(x_ptr + k[None, :], start, k, inner, EVEN).to(tl.float32)
        total += _part(row, start, k, inner, EVEN).to(tl.float32) * x
        if GATED:
            up += _part(other, start, k, inner, EVEN).to(tl.float32) * x
    result = tl.sum(total, 1)
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        result += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        above = tl.sum(up, 1)
        if BIAS:
            above += tl.load(bias_ptr + channels + n, mask=real, other=0.0).to(tl.float32)
        gate = result.to(dtype).to(tl.float32)
        result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * above.to(dtype).to(tl.float32)
    tl.store(out_ptr + n, result.to(dtype), mask=real)


@triton.jit
def _part(row, start, k, inner, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(row + start)
    else:
        w = tl.load(row + start, mask=(start + k < inner)[None, :], other=0.0)
    return w
