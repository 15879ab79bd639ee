"""A matrix product whose sums have the same order whatever the number of rows: the inner dimension is never split.

The libraries' products choose by the shape how to split it, so a row's last bits change with the rows beside it. Here
a channel's weights are the tensor cores' first operand and the rows only make the second one wider: how many there are
changes neither the instruction's inner length nor the order of instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BAND = 8  # tiles of rows that run side by side on the same channels, for the cache


class Tile(NamedTuple):
    rows: int
    channels: int
    step: int  # of the inner dimension
    warps: int
    stages: int


TILES = (Tile(16, 32, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3))


def batch_invariant_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K], w [N, K], bias [N] -> [T, N]."""
    rows, inner = x.shape
    channels = w.shape[0]
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    tile = next((tile for tile in TILES if rows <= tile.rows), TILES[-1])
    if x.element_size() == 4:  # twice the bytes
        tile = tile._replace(step=tile.step // 2, stages=2)
    if rows:
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(channels, tile.channels),)
        _fixed_linear[grid](
            x, w, w if bias is None else bias, out, rows, channels, inner, x.stride(0), w.stride(0),
            ROWS=tile.rows, CHANNELS=tile.channels, STEP=tile.step, BAND=_BAND, BIAS=bias is not None,
            num_warps=tile.warps, num_stages=tile.stages,
        )
    return out


@triton.jit
def _fixed_linear(x_ptr, w_ptr, bias_ptr, out_ptr, rows, channels, inner, x_stride, w_stride, ROWS: tl.constexpr,
                  CHANNELS: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr, BIAS: tl.constexpr):
    row_tiles, channel_tiles = tl.cdiv(rows, ROWS), tl.cdiv(channels, CHANNELS)
    band = tl.program_id(0) // (BAND * channel_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * channel_tiles)
    m = (band * BAND + within % height) * ROWS + tl.arange(0, ROWS)
    n = within // height * CHANNELS + tl.arange(0, CHANNELS)
    k = tl.arange(0, STEP)
    # Rows and channels past the end repeat others and are not stored.
    x_row = x_ptr + (m % rows).to(tl.int64)[None, :] * x_stride
    w_row = w_ptr + (n % channels).to(tl.int64)[:, None] * w_stride
    acc = tl.zeros([CHANNELS, ROWS], tl.float32)
    for start in range(0, inner, STEP):
        at = start + k
        w = tl.load(w_row + at[None, :], mask=at[None, :] < inner, other=0.0)
        x = tl.load(x_row + at[:, None], mask=at[:, None] < inner, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < channels, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * channels + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :] & (n < channels)[:, None])
