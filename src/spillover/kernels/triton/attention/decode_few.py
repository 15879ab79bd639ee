"""Decode attention of few requests in one kernel: q/k norm, rotation, the store into the pool, and what
`ordered_decode` computes, to the same bits.

There are too few programs to hide each other's waits, so each has its keys and values on their way while the kernel
that makes q, k and v still runs. It may: no kernel of a step writes the keys of earlier tokens, the step's items or its
block tables, after the first that waits for all before it. The key and the value of the new token come from registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.batch import AttentionBatch
from spillover.kernels.triton.attention import ordered_splits as splits
from spillover.kernels.triton.attention.ordered_decode import PROGRAMS, end_piece
from spillover.kernels.triton.attention.ordered_tile import load_tile, tile_blocks
from spillover.kernels.triton.attention.softmax import LOG2E, add_piece, piece_begins, take_tile
from spillover.kernels.triton.launch import early
from spillover.kernels.triton.rope_store import norm_heads, rotate

REQUESTS = 8  # most that are few
WARPS = 8
FUSE = True
_FIELDS = tl.constexpr(splits.FIELDS)


def serves(qkv: Tensor, batch: AttentionBatch, kv_heads: int) -> bool:
    """Return whether the step only decodes, for few requests, in a type that this kernel has."""
    work, (rows, _, dim) = batch.work, qkv.shape
    return (FUSE and rows <= REQUESTS and batch.cold is None and work is not None
            and work.splits is not None and work.tiles is None and work.short is None and batch.kv_dtype == "auto"
            and qkv.element_size() == 2 and dim >= 16 and dim & (dim - 1) == 0
            and work.splits.shape[0] * kv_heads <= PROGRAMS)


def decode_few(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """qkv [T, H + 2 Hk, D] of requests with one new token each -> [T, H, D]; keys and values are stored."""
    work, (rows, _, dim), kv_heads = batch.work, qkv.shape, kv_layer.shape[2]
    assert work is not None
    assert work.splits is not None
    assert work.num_splits is not None
    assert work.scratch is not None
    out = torch.empty(rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    group, scratch = num_heads // kv_heads, work.scratch
    _ordered_decode_few[(work.splits.shape[0] * kv_heads,)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, eps, cos, sin, kv_layer, out,
        scratch.sums, scratch.stats, scratch.finished, work.splits, work.num_splits, batch.block_table,
        out if sinks is None else sinks, qkv.stride(0), batch.block_table.stride(0), *kv_layer.stride()[:3], scale,
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        FEW=triton.next_power_of_2(group), DIM=dim, BLOCK=batch.block_size, TILE=splits.TILE,
        WINDOW_PIECE=splits.window_piece(window), NORM=q_norm is not None, SINKS=sinks is not None, num_warps=WARPS,
        num_stages=2, **early(qkv.device),
    )
    return out


@triton.jit
def _ordered_decode_few(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, cos_ptr, sin_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, finished_ptr,
    items_ptr, num_items_ptr, table_ptr, sinks_ptr, row_stride, table_stride, block_stride, kv_stride, head_stride,
    scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW_PIECE: tl.constexpr, NORM: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend one item for one key head."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HALF: tl.constexpr = DIM // 2
    dtype = qkv_ptr.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    item = items_ptr + index * _FIELDS
    row = tl.load(item).to(tl.int64)
    slot = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    oldest = tl.load(item + 4)
    parts = tl.load(item + 5)
    part = tl.load(item + 6)
    first = tl.load(item + 7)
    position = tl.load(item + 9) - 1  # of the new token
    if index >= tl.load(num_items_ptr):
        if EARLY:
            gdc_wait()  # a kernel has not ended before the one ahead of it has
        return
    d = tl.arange(0, DIM)
    half = tl.arange(0, HALF)
    member = tl.arange(0, ROWS)
    there = member < GROUP
    table = table_ptr + slot.to(tl.int64) * table_stride
    slab = kv_ptr + kv_head * head_stride
    nearest = tl.maximum(oldest, 0)
    home = slab + tl.load(table + position // BLOCK).to(tl.int64) * block_stride
    blocks = tile_blocks(table, begin, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    next_blocks = tile_blocks(table, begin + TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    k, v = _cached(slab, blocks, begin, position, end, block_stride, kv_stride, d, DIM, BLOCK, TILE)
    next_k, next_v = _cached(slab, next_blocks, begin + TILE, position, end, block_stride, kv_stride, d, DIM, BLOCK,
                             TILE)
    blocks = tile_blocks(table, begin + 2 * TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + half)[None, :]
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + half)[None, :]
    # Unused, and then not loaded, unless heads have norms.
    low_q_norm, high_q_norm = _halves(q_norm_ptr + half[None, :], HALF)
    low_k_norm, high_k_norm = _halves(k_norm_ptr + half[None, :], HALF)
    if EARLY:
        gdc_wait()

    mine = qkv_ptr + row * row_stride
    head = tl.minimum(kv_head * GROUP + member, HEADS - 1)
    low_q, high_q = _halves(mine + head[:, None] * DIM + half[None, :], HALF)
    low_k, high_k = _halves(mine + (HEADS + kv_head) * DIM + half[None, :], HALF)
    new_v = tl.load(mine + (HEADS + KV_HEADS + kv_head) * DIM + d)
    q = _turned(low_q, high_q, low_q_norm, high_q_norm, cos, sin, eps, ROWS, DIM, NORM, dtype)
    new_k = _turned(low_k, high_k, low_k_norm, high_k_norm, cos, sin, eps, 1, DIM, NORM, dtype).reshape(DIM)
    if end > position:
        tl.store(home + d * BLOCK + position % BLOCK, new_k)
        tl.store(home + kv_stride + position % BLOCK * DIM + d, new_v)

    factor = scale * LOG2E
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    state = (highest, weight, acc, highest, weight, acc)  # of the whole, and of the piece that is being read
    state = _take(q, k, v, new_k, new_v, begin, position, oldest, end, factor, state, TILE, WINDOW_PIECE)
    state = _take(q, next_k, next_v, new_k, new_v, begin + TILE, position, oldest, end, factor, state, TILE,
                  WINDOW_PIECE)
    for start in range(begin + 2 * TILE, end, TILE):
        k, v = _cached(slab, blocks, start, position, end, block_stride, kv_stride, d, DIM, BLOCK, TILE)
        state = _take(q, k, v, new_k, new_v, start, position, oldest, end, factor, state, TILE, WINDOW_PIECE)
        blocks = tile_blocks(table, start + TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    highest, weight, acc = add_piece(state[0], state[1], state[2], state[3], state[4], state[5])
    place = (((first + part) * KV_HEADS + kv_head) * GROUP + member).to(tl.int64)
    end_piece(highest, weight, acc, place, parts, finished_ptr + slot * KV_HEADS + kv_head,
              (first * KV_HEADS + kv_head) * GROUP, kv_head, there, d, out_ptr + row * (HEADS * DIM), sums_ptr,
              stats_ptr, sinks_ptr, HEADS, GROUP, FEW, DIM, DIM, SINKS, 0)


@triton.jit
def _cached(slab, blocks, start, position, end, block_stride, kv_stride, d, DIM: tl.constexpr, BLOCK: tl.constexpr,
            TILE: tl.constexpr):
    """Load the keys and values of a tile that earlier steps have stored."""
    n = start + tl.arange(0, TILE)
    return load_tile(slab, blocks, start, (n < end) & (n < position), block_stride, kv_stride, d, DIM, DIM, BLOCK, TILE,
                     True)


@triton.jit
def _halves(at, HALF: tl.constexpr):
    """Load heads, or the weights of their norm, as float32 halves."""
    return tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)


@triton.jit
def _turned(low, high, low_norm, high_norm, cos, sin, eps, ROWS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
            dtype: tl.constexpr):
    """Norm and rotate heads given as halves -> [ROWS, DIM]."""
    if NORM:
        low, high = norm_heads(low, high, low_norm, high_norm, eps, DIM, ROWS, DIM // 2, dtype)
    low, high = rotate(low, high, cos, sin, dtype)
    return tl.join(low, high).permute(0, 2, 1).reshape(ROWS, DIM).to(dtype)


@triton.jit
def _take(q, k, v, new_k, new_v, start, position, oldest, end, factor, state, TILE: tl.constexpr,
          WINDOW_PIECE: tl.constexpr):
    """Take a tile into the sums, with the new token's key and value where it is theirs."""
    n = start + tl.arange(0, TILE)
    k = tl.where((n == position)[None, :], new_k[:, None], k)
    v = tl.where((n == position)[:, None], new_v[None, :], v)
    visible = n < end
    if WINDOW_PIECE > 0:
        visible = visible & (n >= oldest)
    return take_tile(q, k, v, visible[None, :], None, None, factor, piece_begins(start, WINDOW_PIECE), state[0],
                     state[1], state[2], state[3], state[4], state[5], True, 0)
