"""Matrix products whose sums have one order, so that a row has the same bits whatever the rows beside it.

The inner dimension is summed in ascending order, in chunks that are a constant of the matrix: each chunk is summed from
nothing, and chunks are added in their order. What tensor cores make of an element depends on that order alone, so tiles
follow the number of rows freely. Of few rows each chunk has programs of its own, which keeps the device busy with
narrow matrices; of many rows a program takes all chunks of its tile.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from spillover.kernels.extents import SPREAD_ROWS, product_chunks
from spillover.kernels.triton.launch import early

ARRIVALS = 1 << 16  # tiles of a launch whose chunks have programs of their own, at most
BAND = 8  # tiles of rows that run side by side on the same channels, for the cache


class Tile(NamedTuple):
    rows: int
    channels: int
    step: int  # of the inner dimension
    warps: int
    stages: int


# By the rows that they are for; of more rows than the last of FEW has, MANY.
FEW = (Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3))
MANY = Tile(128, 256, 64, 8, 3)


def ordered_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """Multiply x [T, K], w [N, K], bias [N] -> [T, N]."""
    return _run(x, w, bias, w.shape[0], False, tile)


def ordered_linear_silu(x: Tensor, w: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """Multiply x [T, K], w [2I, K], the gate's rows first -> silu(gate) * up [T, I]."""
    return _run(x, w, bias, w.shape[0] // 2, True, tile)


def _run(x: Tensor, w: Tensor, bias: Tensor | None, channels: int, gated: bool, tile: Tile | None) -> Tensor:
    rows = x.shape[0]
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if tile is None:
        tile = next((tile for tile in FEW if rows <= tile.rows), MANY)
        if tile is MANY and (x.element_size() == 4 or not _describable(x, w)):
            tile = FEW[-1]
    if rows and tile is MANY:
        _launch_many(x, w, bias, out, gated, tile)
    elif rows:
        _launch_few(x, w, bias, out, gated, tile)
    return out


def _launch_few(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, gated: bool, tile: Tile) -> None:
    rows, channels = out.shape
    inner = x.shape[1]
    chunks, chunk = product_chunks(w.shape[0], inner)
    spread = chunks > 1 and rows <= SPREAD_ROWS
    if x.element_size() == 4:  # twice the bytes
        tile = tile._replace(step=tile.step // 2, stages=2)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(channels, tile.channels)
    sums, arrivals = x, x
    if spread:
        assert tiles <= ARRIVALS
        sums = torch.empty(tiles * chunks * (2 if gated else 1) * tile.rows * tile.channels, dtype=torch.float32,
                           device=x.device)
        arrivals = _arrivals(x.device)
    _few_rows[(tiles * (chunks if spread else 1),)](
        x, w, w if bias is None else bias, out, sums, arrivals, rows, channels, inner, chunk, x.stride(0),
        w.stride(0), CHUNKS=chunks, SPREAD=spread, ROWS=tile.rows, CHANNELS=tile.channels, STEP=tile.step,
        EVEN=inner % tile.step == 0, BIAS=bias is not None, GATED=gated, num_warps=tile.warps, num_stages=tile.stages,
        **early(x.device),
    )


def _launch_many(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, gated: bool, tile: Tile) -> None:
    rows, channels = out.shape
    chunks, chunk = product_chunks(w.shape[0], x.shape[1])
    width = tile.channels // 2 if gated else tile.channels
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(channels, width)
    _many_rows[(min(tiles, _processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.step]), TensorDescriptor.from_tensor(w, [width, tile.step]),
        w if bias is None else bias, out, rows, channels, x.shape[1], chunk, CHUNKS=chunks,
        ROWS=tile.rows, CHANNELS=width, STEP=tile.step, BAND=BAND, BIAS=bias is not None, GATED=gated,
        num_warps=tile.warps, num_stages=tile.stages,
    )


def _describable(x: Tensor, w: Tensor) -> bool:
    """Return whether the tensor memory accelerator can read both: rows begin at multiples of 16 bytes."""
    return all(each.data_ptr() % 16 == 0 and each.stride(0) * each.element_size() % 16 == 0 and each.stride(1) == 1
               for each in (x, w))


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of `_few_rows`: every launch leaves them zero. Launches must not run side by side."""
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _few_rows(
    x_ptr, w_ptr, bias_ptr, out_ptr, sums_ptr, arrivals_ptr, rows, channels, inner, chunk, x_stride, w_stride,
    CHUNKS: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):
    """Multiply a tile. With SPREAD a program multiplies one chunk of it, and the last to finish adds them up."""
    PROGRAMS: tl.constexpr = CHUNKS if SPREAD else 1  # of a tile
    row_tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0) // (row_tiles * PROGRAMS) * row_tiles + tl.program_id(0) % row_tiles
    part = tl.program_id(0) // row_tiles % PROGRAMS
    m = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    n = tile // row_tiles * CHANNELS + tl.arange(0, CHANNELS)
    # Rows and channels past the end repeat others and are not stored. Weights are the left operand: rows are few.
    x_row = x_ptr + (m % rows).to(tl.int64)[None, :] * x_stride
    w_row = w_ptr + (n % channels).to(tl.int64)[:, None] * w_stride
    up_row = w_row + channels.to(tl.int64) * w_stride
    begin = part * chunk
    end = tl.minimum(begin + chunk, inner) if SPREAD else inner
    if EARLY:
        gdc_launch_dependents()
    # The first weights are on their way while the kernel that makes x still runs.
    w = _weights(w_row, begin, inner, STEP, EVEN)
    if GATED:
        up = _weights(up_row, begin, inner, STEP, EVEN)
    if EARLY:
        gdc_wait()
    x = _inputs(x_row, begin, inner, STEP, EVEN)
    acc = tl.dot(w, x, tl.zeros([CHANNELS, ROWS], tl.float32), input_precision="ieee")
    if GATED:
        up_acc = tl.dot(up, x, tl.zeros([CHANNELS, ROWS], tl.float32), input_precision="ieee")
    total = tl.zeros([CHANNELS, ROWS], tl.float32)
    up_total = total
    for k in range(begin + STEP, end, STEP):
        if (CHUNKS > 1 and not SPREAD) and (k % chunk == 0):
            total += acc
            acc = tl.zeros([CHANNELS, ROWS], tl.float32)
            if GATED:
                up_total += up_acc
                up_acc = tl.zeros([CHANNELS, ROWS], tl.float32)
        w = _weights(w_row, k, inner, STEP, EVEN)
        x = _inputs(x_row, k, inner, STEP, EVEN)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            up = _weights(up_row, k, inner, STEP, EVEN)
            up_acc = tl.dot(up, x, up_acc, input_precision="ieee")
    last = True
    if CHUNKS > 1 and not SPREAD:
        acc += total
        if GATED:
            up_acc += up_total
    if SPREAD:
        SIZE: tl.constexpr = CHANNELS * ROWS
        HALVES: tl.constexpr = 2 if GATED else 1
        place = tl.arange(0, CHANNELS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        sums = sums_ptr + tile.to(tl.int64) * (CHUNKS * HALVES * SIZE) + place
        tl.store(sums + part * (HALVES * SIZE), acc)
        if GATED:
            tl.store(sums + part * (HALVES * SIZE) + SIZE, up_acc)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == CHUNKS - 1
        if last:
            tl.store(arrivals_ptr + tile, 0)
            tl.debug_barrier()
            acc = _add_up(sums, CHUNKS, HALVES * SIZE, acc)
            if GATED:
                up_acc = _add_up(sums + SIZE, CHUNKS, HALVES * SIZE, up_acc)
    if last:
        real = n < channels
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                up_acc += tl.load(bias_ptr + channels + n, mask=real, other=0.0).to(tl.float32)[:, None]
            acc = _silu_and_mul(acc, up_acc, out_ptr.dtype.element_ty)
        out = out_ptr + m.to(tl.int64)[None, :] * channels + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :] & real[:, None])


@triton.jit
def _add_up(sums, CHUNKS: tl.constexpr, APART: tl.constexpr, like):
    """Add chunks in their order. They are read from beyond the first cache: other multiprocessors wrote them."""
    total = tl.zeros_like(like)
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(sums + chunk * APART, cache_modifier=".cg")
    return total


@triton.jit
def _weights(row, k, inner, STEP: tl.constexpr, EVEN: tl.constexpr):
    at = k + tl.arange(0, STEP)[None, :]
    return tl.load(row + at) if EVEN else tl.load(row + at, mask=at < inner, other=0.0)


@triton.jit
def _inputs(row, k, inner, STEP: tl.constexpr, EVEN: tl.constexpr):
    at = k + tl.arange(0, STEP)[:, None]
    return tl.load(row + at) if EVEN else tl.load(row + at, mask=at < inner, other=0.0)


@triton.jit
def _many_rows(
    x_desc, w_desc, bias_ptr, out_ptr, rows, channels, inner, chunk, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
):
    """Multiply tiles, one after another, all chunks of each."""
    row_tiles, channel_tiles = tl.cdiv(rows, ROWS), tl.cdiv(channels, CHANNELS)
    dtype = out_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), row_tiles * channel_tiles, tl.num_programs(0)):
        band = tile // (BAND * channel_tiles)
        height = tl.minimum(row_tiles - band * BAND, BAND)
        within = tile % (BAND * channel_tiles)
        first_row = (band * BAND + within % height) * ROWS
        first_channel = within // height * CHANNELS
        acc = tl.zeros([ROWS, CHANNELS], tl.float32)
        up_acc = acc
        total = acc
        up_total = acc
        for k in range(0, inner, STEP):
            x = x_desc.load([first_row, k])
            acc = tl.dot(x, w_desc.load([first_channel, k]).T, acc)
            if GATED:
                up_acc = tl.dot(x, w_desc.load([channels + first_channel, k]).T, up_acc)
            if (CHUNKS > 1) and ((k + STEP) % chunk == 0):
                total += acc
                acc = tl.zeros([ROWS, CHANNELS], tl.float32)
                if GATED:
                    up_total += up_acc
                    up_acc = tl.zeros([ROWS, CHANNELS], tl.float32)
        if CHUNKS > 1:
            acc += total
            if GATED:
                up_acc += up_total
        m = first_row + tl.arange(0, ROWS)
        n = first_channel + tl.arange(0, CHANNELS)
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < channels, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if BIAS:
                up_acc += tl.load(bias_ptr + channels + n, mask=n < channels, other=0.0).to(tl.float32)[None, :]
            acc = _silu_and_mul(acc, up_acc, dtype)
        out = out_ptr + m.to(tl.int64)[:, None] * channels + n[None, :]
        tl.store(out, acc.to(dtype), mask=(m < rows)[:, None] & (n < channels)[None, :])


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up, rounded wherever `activation.silu_and_mul` of rounded products is."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
