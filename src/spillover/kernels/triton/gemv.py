"""Products of a weight with a single row: the weight is read once, as fast as memory gives it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.launch import early

CHANNELS = 4  # output channels a program
STEP = 1024  # of the inner dimension
WARPS = 4


def gemv(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, K], w [N, K], bias [N] -> [1, N]. Sums in float32, in one fixed order."""
    return _run(x, w, bias, w.shape[0], gated=False)


def gemv_silu(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, K], w [2I, K], the gate's rows first -> silu(gate) * up [1, I]."""
    return _run(x, w, bias, w.shape[0] // 2, gated=True)


def _run(x: Tensor, w: Tensor, bias: Tensor | None, channels: int, gated: bool) -> Tensor:
    inner = x.shape[1]
    out = torch.empty(1, channels, dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(channels, CHANNELS),)](
        x, w, w if bias is None else bias, out, channels, inner, w.stride(0),
        CHANNELS=CHANNELS, STEP=STEP, EVEN=inner % STEP == 0, BIAS=bias is not None, GATED=gated,
        num_warps=WARPS, num_stages=4, **early(x.device),
    )
    return out


@triton.jit
def _gemv(x_ptr, w_ptr, bias_ptr, out_ptr, channels, inner, w_stride, CHANNELS: tl.constexpr, STEP: tl.constexpr,
          EVEN: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = n < channels
    k = tl.arange(0, STEP)
    row = w_ptr + tl.where(real, n, 0).to(tl.int64)[:, None] * w_stride + k[None, :]
    other = row + channels.to(tl.int64) * w_stride  # of the second half
    if EARLY:
        gdc_launch_dependents()
    # The first weights are on their way while the kernel that makes x still runs.
    w = _weights(row, 0, k, inner, EVEN)
    if GATED:
        u = _weights(other, 0, k, inner, EVEN)
    if EARLY:
        gdc_wait()
    # One sum as wide as the tile, so that threads need not talk to each other in the loop.
    x = tl.load(x_ptr + k, mask=k < inner, other=0.0).to(tl.float32)[None, :]
    total = w * x
    if GATED:
        up = u * x
    for start in range(STEP, inner, STEP):
        x = tl.load(x_ptr + start + k, mask=start + k < inner, other=0.0).to(tl.float32)[None, :]
        total += _weights(row, start, k, inner, EVEN) * x
        if GATED:
            up += _weights(other, start, k, inner, EVEN) * x
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
def _weights(row, start, k, inner, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(row + start)
    else:
        w = tl.load(row + start, mask=(start + k < inner)[None, :], other=0.0)
    return w.to(tl.float32)
