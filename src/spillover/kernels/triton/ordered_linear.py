"""Matrix products whose sums have one order, so that a row has the same bits whatever the other rows of the batch.

The inner dimension is summed in ascending order, in chunks that are a constant of the matrix: each chunk is summed from
zero, and chunks are added in order. The result of the tensor cores for an element depends on that order alone, so tiles
may depend on the number of rows. For a few rows all chunks of a tile are computed concurrently, each in separate warps,
and a program's weights that fit into shared memory are loaded before the previous kernel has completed. For more rows
each chunk of a narrow matrix has separate programs, to keep the device busy; otherwise a program computes all chunks.
Many rows are multiplied in CUDA C++ where that is possible (cuda/ordered_gemm.py), in the same order.
"""

from __future__ import annotations

import bisect
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from spillover.kernels.cuda import ordered_gemm
from spillover.kernels.extents import WIDE_CHANNELS, product_chunks
from spillover.kernels.triton.activation import silu_and_mul
from spillover.kernels.triton.launch import NO_FUSION, pdl_options
from spillover.kernels.triton.norm import add_rms_norm, early_if_gated, pairwise_sum, scaled

FEW = 16  # maximum number of rows for `_few_rows`
AHEAD_ROWS = 8  # maximum number of rows of a product whose programs prefetch all of their weights
AHEAD_BYTES = 64 << 10  # maximum bytes of prefetched weights per program
AHEAD_WARPS = 4
AHEAD_PROGRAMS = 400  # maximum number of programs per launch where up to 32 channels per program allow that
ARRIVALS = 1 << 16  # maximum number of tiles of a launch in which each chunk has a separate program
BAND = 8  # row tiles computed concurrently on the same channels, which then stay in the cache


class Tile(NamedTuple):
    """How a product is divided. For `flip` and `spread` see FLIP and SPREAD of `_described`."""

    rows: int
    channels: int
    step: int  # columns of the inner dimension per iteration
    warps: int
    stages: int
    flip: bool = False
    spread: bool = False


class Tiles(NamedTuple):
    """Tiles for one number of rows, by a matrix's channels: up to NARROW, up to MIDDLE, more, too many for chunks."""

    narrow: Tile
    middle: Tile
    broad: Tile
    wide: Tile
    long: Tile  # for a matrix with chunks whose inner dimension exceeds LONG, unless it is narrow


NARROW, MIDDLE, LONG = 2048, 4096, 8192
SMALL, SMALL_SPREAD = Tile(32, 64, 128, 4, 4, flip=True), Tile(32, 64, 128, 4, 4, flip=True, spread=True)
DEEP, DEEP_SPREAD = Tile(64, 64, 64, 4, 6, flip=True), Tile(64, 64, 64, 4, 6, flip=True, spread=True)
SQUARE, SQUARE_SPREAD = Tile(128, 128, 64, 8, 6), Tile(128, 128, 64, 8, 6, spread=True)
LARGE = Tile(128, 256, 64, 8, 3)
# By maximum number of rows: the fastest tiles of those measured on an H200 with the shapes of Qwen3-0.6B, Qwen3-14B and
# Llama-3.1-8B. All give the same bits.
TILES = {
    32: Tiles(SMALL_SPREAD, SMALL_SPREAD, SMALL, SMALL, SMALL_SPREAD),
    64: Tiles(SMALL_SPREAD, Tile(64, 64, 128, 4, 4, flip=True), Tile(64, 64, 128, 4, 4, flip=True), DEEP, DEEP_SPREAD),
    128: Tiles(Tile(64, 64, 128, 4, 6, flip=True, spread=True), Tile(64, 64, 128, 4, 6, flip=True),
               Tile(128, 64, 128, 4, 4), SQUARE, SQUARE_SPREAD),
    256: Tiles(DEEP_SPREAD, DEEP, SQUARE, Tile(128, 256, 64, 8, 4), SQUARE_SPREAD),
    512: Tiles(SQUARE_SPREAD, SQUARE, Tile(128, 256, 64, 8, 4), LARGE, SQUARE),
    2048: Tiles(Tile(128, 128, 64, 8, 4), LARGE, LARGE, LARGE, LARGE),
}
ROWS = sorted(TILES)


def ordered_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """Multiply x [T, K] by w [N, K], with bias [N] -> [T, N]. `tile` forces the Triton kernel with this tile."""
    rows, channels = x.shape[0], w.shape[0]
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if rows and (tile is not None or rows > FEW) and x.element_size() == 2 and _tma_readable(x, w):
        if tile is not None or not ordered_gemm.multiply(x, w, bias, out, pdl_options(x.device)["EARLY"]):
            _launch_many(x, w, bias, out, tile or _tile(rows, channels, w.shape[1]))
    elif rows:
        _launch_few(x, w, bias, out, False)
    return out


def ordered_linear_silu(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] by w [2I, K], the gate's rows first -> silu(gate) * up [T, I]."""
    out = torch.empty(x.shape[0], w.shape[0] // 2, dtype=x.dtype, device=x.device)
    if len(out) > FEW:
        fused = x.element_size() == 2 and _tma_readable(x, w)
        if not fused or not ordered_gemm.multiply(x, w, bias, out, pdl_options(x.device)["EARLY"], gated=True):
            return silu_and_mul(ordered_linear(x, w, bias))
    elif len(out):
        _launch_few(x, w, bias, out, True)
    return out


def add_norm_linear(x: Tensor, residual: Tensor, norm: Tensor, eps: float, w: Tensor, bias: Tensor | None = None,
                    gated: bool = False) -> tuple[Tensor, Tensor]:
    """Add, normalise and multiply x and residual [T, K], norm [K], w [N, K] -> (rms_norm(x + residual) times w, x +
    residual); with `gated` the product is that of `ordered_linear_silu`."""
    rows, inner = x.shape
    channels = w.shape[0] // 2 if gated else w.shape[0]
    width = _ahead_width(x, w, gated)
    if (rows and width and inner == triton.next_power_of_2(inner) and x.is_contiguous()
            and residual.is_contiguous()):
        out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
        total = torch.empty_like(residual)
        _launch_ahead(x, w, bias, out, gated, width, residual, norm, total, eps)
        return out, total
    x, residual = add_rms_norm(x, residual, norm, eps, begin_early=not gated or early_if_gated(rows, inner))
    return (ordered_linear_silu if gated else ordered_linear)(x, w, bias), residual


def _ahead_width(x: Tensor, w: Tensor, gated: bool) -> int:
    """Return the channels of a program that prefetches all of its weights; 0 if they would be too many bytes."""
    rows, inner = x.shape
    chunks, chunk = product_chunks(w.shape[0], inner)
    if rows > AHEAD_ROWS or chunks == 1 or inner != chunks * chunk or x.element_size() != 2:
        return 0
    matrices = 2 if gated else 1
    row_bytes, programs = matrices * inner * 2, w.shape[0] // matrices
    width = next((width for width in (8, 16, 32) if programs <= width * AHEAD_PROGRAMS), 32)
    return width if width * row_bytes <= AHEAD_BYTES else 0


def _launch_ahead(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, gated: bool, width: int,
                  residual: Tensor | None = None, norm: Tensor | None = None, total: Tensor | None = None,
                  eps: float = 0.0) -> None:
    (rows, channels), inner = out.shape, x.shape[1]
    chunks, chunk = product_chunks(w.shape[0], inner)
    step = chunk if norm is not None else 256 if chunk % 256 == 0 else 128
    _few_rows_ahead[(triton.cdiv(channels, width),)](
        x, x if residual is None else residual, x if norm is None else norm, w, w if bias is None else bias, out,
        out if total is None else total, eps, rows, channels, x.stride(0), w.stride(0), CHUNKS=chunks, CHUNK=chunk,
        STEP=step, ROWS=AHEAD_ROWS, REAL=1 if rows == 1 else AHEAD_ROWS, CHANNELS=width, NORM=norm is not None,
        BIAS=bias is not None, GATED=gated, num_warps=AHEAD_WARPS, **NO_FUSION,
        **pdl_options(x.device),
    )


def _launch_few(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, gated: bool) -> None:
    """Launch `_few_rows`: for up to FEW rows, or any number if the tensor memory accelerator cannot read x or w."""
    width = _ahead_width(x, w, gated)
    if width:
        _launch_ahead(x, w, bias, out, gated, width)
        return
    (rows, channels), inner = out.shape, x.shape[1]
    chunks, chunk = product_chunks(w.shape[0], inner)
    height, width, step, stages = 16, 64, 128, 4
    if chunks > 1:
        height = 8 if rows <= 8 else 16
        width = 16 if gated or not _balanced(channels, 32, _processors(x.device)) else 32
        stages = 4 if width == 16 and height == 8 and not gated else 3
    if x.element_size() == 4:  # float32 needs twice the bytes
        step, stages = 64, 2
    _few_rows[(triton.cdiv(rows, height) * triton.cdiv(channels, width),)](
        x, w, w if bias is None else bias, out, rows, channels, inner, chunk, x.stride(0), w.stride(0), CHUNKS=chunks,
        ROWS=height, CHANNELS=width, STEP=step, EVEN=inner == chunks * chunk, BIAS=bias is not None, GATED=gated,
        num_warps=4, num_stages=stages, **pdl_options(x.device),
    )


@cache
def _balanced(channels: int, width: int, processors: int) -> bool:
    """Return whether programs of `width` channels keep multiprocessors at least as busy as programs of half as many."""
    wide, narrow = -(-channels // width), -(-2 * channels // width)
    return wide / -(-wide // processors) >= narrow / -(-narrow // processors)


def _launch_many(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    (rows, channels), inner = out.shape, x.shape[1]
    chunks, chunk = product_chunks(channels, inner)
    spread = tile.spread and chunks > 1
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(channels, tile.channels)
    sums, arrivals, programs = x, x, tiles
    if spread:
        assert tiles <= ARRIVALS
        sums = torch.empty(tiles * chunks * tile.rows * tile.channels, dtype=torch.float32, device=x.device)
        arrivals, programs = _arrivals(x.device), tiles * chunks
    elif tile.warps == 8:
        programs = min(tiles, _processors(x.device))
    _described[(programs,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
        TensorDescriptor.from_tensor(w, [tile.channels, tile.step]), w if bias is None else bias, out, sums, arrivals,
        rows, channels, inner, chunk, CHUNKS=chunks, SPREAD=spread, ROWS=tile.rows, CHANNELS=tile.channels,
        STEP=tile.step, BAND=BAND, FLIP=tile.flip, BIAS=bias is not None, num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(x.device),
    )


def _tile(rows: int, channels: int, inner: int) -> Tile:
    """Choose the tile of a product of more than FEW rows."""
    index = bisect.bisect_left(ROWS, rows)
    if index == len(ROWS):
        return LARGE
    tiles = TILES[ROWS[index]]
    if channels >= WIDE_CHANNELS:
        return tiles.wide
    if inner > LONG and channels > NARROW:
        return tiles.long
    return tiles.narrow if channels <= NARROW else tiles.middle if channels <= MIDDLE else tiles.broad


def _tma_readable(x: Tensor, w: Tensor) -> bool:
    """Return whether the tensor memory accelerator can read both: rows must begin at multiples of 16 bytes."""
    return all(each.data_ptr() % 16 == 0 and each.stride(0) * each.element_size() % 16 == 0 and each.stride(1) == 1
               for each in (x, w))


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters of completed chunks: every launch leaves them at zero. Launches must not run concurrently."""
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, channels, inner, chunk, x_stride, w_stride, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):
    """Multiply a tile, all chunks concurrently: each has separate warps."""
    row_tiles = tl.cdiv(rows, ROWS)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // row_tiles * CHANNELS + tl.arange(0, CHANNELS)
    k = tl.arange(0, STEP)
    # Channels past the end repeat others and are not stored. Weights are the left operand: rows are few.
    w_row, x_row = w_ptr + (n % channels).to(tl.int64) * w_stride, x_ptr + m.to(tl.int64) * x_stride
    if CHUNKS == 1:
        w_k, x_k, real_row = k[None, :], k[:, None], (m < rows)[None, :]
        w_at, x_at = w_row[:, None] + w_k, x_row[None, :] + x_k
        acc = tl.zeros([CHANNELS, ROWS], tl.float32)
    else:  # a chunk is a multiple of a step; the last ones may be cut off
        begin = tl.arange(0, CHUNKS)[:, None, None] * chunk
        w_k, x_k, real_row = begin + k[None, None, :], begin + k[None, :, None], (m < rows)[None, None, :]
        w_at, x_at = w_row[None, :, None] + w_k, x_row[None, None, :] + x_k
        acc = tl.zeros([CHUNKS, CHANNELS, ROWS], tl.float32)
    up_at = w_at + channels.to(tl.int64) * w_stride
    up_acc = acc
    if EARLY:
        gdc_launch_dependents()
    # The first weights are loaded while the kernel that computes x still runs.
    w = _weights(w_at, w_k, 0, inner, EVEN)
    if GATED:
        up = _weights(up_at, w_k, 0, inner, EVEN)
    if EARLY:
        gdc_wait()
    x = _inputs(x_at, real_row, x_k, 0, inner, EVEN)
    acc = tl.dot(w, x, acc, input_precision="ieee")
    if GATED:
        up_acc = tl.dot(up, x, up_acc, input_precision="ieee")
    for i in range(STEP, chunk, STEP):
        w = _weights(w_at, w_k, i, inner, EVEN)
        x = _inputs(x_at, real_row, x_k, i, inner, EVEN)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            up = _weights(up_at, w_k, i, inner, EVEN)
            up_acc = tl.dot(up, x, up_acc, input_precision="ieee")
    result = _result(acc, up_acc, bias_ptr, n, channels, CHUNKS, CHANNELS, ROWS, BIAS, GATED, out_ptr.dtype.element_ty)
    out = out_ptr + m.to(tl.int64)[None, :] * channels + n[:, None]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :] & (n < channels)[:, None])


def _name(specialization: Any) -> str:
    """Name the kernel for profiles, which recognise the start of a half layer by its norm."""
    return "_add_rms_norm_few_rows" if specialization.constants["NORM"] else "_few_rows_ahead"


@triton.jit(do_not_specialize=["rows"], repr=_name)
def _few_rows_ahead(
    x_ptr, residual_ptr, norm_ptr, w_ptr, bias_ptr, out_ptr, total_ptr, eps, rows, channels, x_stride, w_stride,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr,
    CHANNELS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply a tile as `_few_rows` does, with all weights loaded to shared memory while the kernel that computes x
    still runs. With NORM every program first adds x to the residual and normalises it. REAL: rows loaded, of ROWS."""
    m = tl.arange(0, REAL)
    n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real_row = (m < rows)[None, None, :]
    begin = tl.arange(0, CHUNKS)[:, None, None] * CHUNK
    w_k, x_k = begin + tl.arange(0, STEP)[None, None, :], begin + tl.arange(0, STEP)[None, :, None]
    w_at = w_ptr + (n % channels).to(tl.int64)[None, :, None] * w_stride + w_k
    x_at = tl.minimum(m, rows - 1).to(tl.int64)[None, None, :] * x_stride + x_k
    up_at = w_at + channels.to(tl.int64) * w_stride
    dtype = out_ptr.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
    weights, ups = (), ()
    for i in tl.static_range(0, CHUNK, STEP):
        weights = weights + (tl.load(w_at + i),)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            ups = ups + (tl.load(up_at + i),)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        scale = tl.load(norm_ptr + x_k).to(tl.float32)
    if EARLY:
        gdc_wait()
    inputs = ()
    for i in tl.static_range(0, CHUNK, STEP):
        inputs = inputs + (tl.load(x_ptr + x_at + i),)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:  # a chunk is one step
        x = inputs[0].to(tl.float32)  # type: ignore[misc]
        x += tl.load(residual_ptr + x_at).to(tl.float32)
        rounded = x.to(dtype)  # the sum, rounded as it is stored
        if tl.program_id(0) == 0:
            tl.store(total_ptr + x_at, rounded, mask=real_row)
        x = rounded.to(tl.float32)
        squares = pairwise_sum((x * x).permute(2, 0, 1).reshape(REAL, CHUNKS * CHUNK), REAL, CHUNKS * CHUNK)
        factor = tl.rsqrt(squares / (CHUNKS * CHUNK) + eps)
        inputs = (scaled(x, factor[None, None, :], scale, dtype),)  # type: ignore[assignment]
    acc = tl.zeros([CHUNKS, CHANNELS, ROWS], tl.float32)
    up_acc = acc
    for i in tl.static_range(CHUNK // STEP):
        # This select makes the compiler move a step's inputs to shared memory only after all loads have been issued.
        x = tl.broadcast_to(tl.where(real_row, inputs[i], 0.0), [CHUNKS, STEP, ROWS])
        acc = tl.dot(weights[i], x, acc)
        if GATED:
            up_acc = tl.dot(ups[i], x, up_acc)
    result = _result(acc, up_acc, bias_ptr, n, channels, CHUNKS, CHANNELS, ROWS, BIAS, GATED, dtype)
    row = tl.arange(0, ROWS)
    out = out_ptr + row[None, :] * channels + n[:, None]
    tl.store(out, result.to(dtype), mask=(row < rows)[None, :] & (n < channels)[:, None])


@triton.jit
def _result(sums, up_sums, bias_ptr, n, channels, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
            BIAS: tl.constexpr, GATED: tl.constexpr, dtype: tl.constexpr):
    """Return the values of a tile of channels `n`, from the sums of its chunks."""
    result = _in_order(sums, CHUNKS, CHANNELS, ROWS)
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < channels, other=0.0).to(tl.float32)[:, None]
    if GATED:
        above = _in_order(up_sums, CHUNKS, CHANNELS, ROWS)
        if BIAS:
            above += tl.load(bias_ptr + channels + n, mask=n < channels, other=0.0).to(tl.float32)[:, None]
        result = _silu_and_mul(result, above, dtype)
    return result


@triton.jit
def _in_order(sums, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Add the sums of four chunks [4, N, M] one after another -> [N, M]."""
    if CHUNKS == 1:
        total = sums
    else:
        even, odd = sums.reshape(2, 2, CHANNELS, ROWS).permute(2, 3, 0, 1).split()
        first, third = even.split()
        second, fourth = odd.split()
        total = ((first + second) + third) + fourth
    return total


@triton.jit
def _weights(at, k, i, inner, EVEN: tl.constexpr):
    return tl.load(at + i) if EVEN else tl.load(at + i, mask=k + i < inner, other=0.0)


@triton.jit
def _inputs(at, real, k, i, inner, EVEN: tl.constexpr):
    return tl.load(at + i, mask=real if EVEN else real & (k + i < inner), other=0.0)


@triton.jit
def _add_up(sums, CHUNKS: tl.constexpr, APART: tl.constexpr, like):
    """Add up chunks in order, read bypassing L1: other multiprocessors wrote them."""
    total = tl.zeros_like(like)
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(sums + chunk * APART, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["rows"])
def _described(
    x_desc, w_desc, bias_ptr, out_ptr, sums_ptr, arrivals_ptr, rows, channels, inner, chunk, CHUNKS: tl.constexpr,
    SPREAD: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr,
    FLIP: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):
    """Multiply tiles, one after another. With SPREAD a program multiplies one chunk of one tile, and the tile's last to
    complete adds them up. FLIP: the weights are the left operand, for tiles of few rows."""
    PROGRAMS: tl.constexpr = CHUNKS if SPREAD else 1  # programs per tile
    SIZE: tl.constexpr = ROWS * CHANNELS
    row_tiles, channel_tiles = tl.cdiv(rows, ROWS), tl.cdiv(channels, CHANNELS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for unit in range(tl.program_id(0), row_tiles * channel_tiles * PROGRAMS, tl.num_programs(0)):
        tile, row, channel, part = _place(unit, row_tiles, channel_tiles, PROGRAMS, BAND)
        begin = part * chunk
        end = tl.minimum(begin + chunk, inner) if SPREAD else inner
        acc = _nothing(ROWS, CHANNELS, FLIP)
        total = acc
        for k in range(begin, end, STEP):
            x = x_desc.load([row * ROWS, k])
            w = w_desc.load([channel * CHANNELS, k])
            acc = tl.dot(w, x.T, acc) if FLIP else tl.dot(x, w.T, acc)
            if (CHUNKS > 1 and not SPREAD) and ((k + STEP) % chunk == 0):
                total += acc
                acc = _nothing(ROWS, CHANNELS, FLIP)
        last = True
        if CHUNKS > 1 and not SPREAD:
            acc += total
        m = tl.arange(0, ROWS)[None, :] if FLIP else tl.arange(0, ROWS)[:, None]
        n = tl.arange(0, CHANNELS)[:, None] if FLIP else tl.arange(0, CHANNELS)[None, :]
        if SPREAD:
            sums = sums_ptr + tile.to(tl.int64) * (CHUNKS * SIZE) + (n * ROWS + m if FLIP else m * CHANNELS + n)
            tl.store(sums + part * SIZE, acc)
            tl.debug_barrier()  # all sums of this program are written before it increments the counter
            last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == CHUNKS - 1
            if last:
                tl.store(arrivals_ptr + tile, 0)
                tl.debug_barrier()
                acc = _add_up(sums, CHUNKS, SIZE, acc)
        if last:
            m += row * ROWS
            n += channel * CHANNELS
            if BIAS:
                acc += tl.load(bias_ptr + n, mask=n < channels, other=0.0).to(tl.float32)
            out = out_ptr + m.to(tl.int64) * channels + n
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows) & (n < channels))


@triton.jit
def _place(unit, row_tiles, channel_tiles, PROGRAMS: tl.constexpr, BAND: tl.constexpr):
    """Return the index of a program's tile, its row and column of tiles, and the index of the program's chunk."""
    tile = unit // PROGRAMS
    band = tile // (BAND * channel_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    within = tile % (BAND * channel_tiles)
    return tile, band * BAND + within % height, within // height, unit % PROGRAMS


@triton.jit
def _nothing(ROWS: tl.constexpr, CHANNELS: tl.constexpr, FLIP: tl.constexpr):
    return tl.zeros([CHANNELS, ROWS] if FLIP else [ROWS, CHANNELS], tl.float32)


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up, rounded at the same points as rounded products and `activation.silu_and_mul`."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
