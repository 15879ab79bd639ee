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
from spillover.kernels.triton.attention.ordered_decode import end_piece
from spillover.kernels.triton.attention.ordered_tile import load_tile, tile_blocks
from spillover.kernels.triton.attention.softmax import LOG2E, add_piece, piece_begins, take_tile
from spillover.kernels.triton.launch import AS_WRITTEN, early
from spillover.kernels.triton.norm import pairwise_sum, scaled

REQUESTS = 2  # most that are few: of more, programs hide each other's waits
WARPS = 8
_FIELDS = tl.constexpr(splits.FIELDS)


def serves(qkv: Tensor, batch: AttentionBatch, kv_heads: int) -> bool:
    """Return whether the step only decodes, for few requests, in a type that this kernel has."""
    work, (rows, _, dim) = batch.work, qkv.shape
    return (rows <= REQUESTS and batch.cold is None and work is not None
            and work.splits is not None and work.tiles is None and work.short is None and batch.kv_dtype == "auto"
            and qkv.element_size() == 2 and dim >= 16 and dim & (dim - 1) == 0
            and work.splits.shape[0] * kv_heads <= splits.PROGRAMS)


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
    """Norm, rotate, store and attend, qkv [T, H + 2 Hk, D] of requests with one new token each -> [T, H, D]; keys and
    values are stored."""
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
        num_stages=2, **AS_WRITTEN, **early(qkv.device),
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
    partner = d ^ HALF  # what a dimension is rotated with
    member = tl.arange(0, ROWS)
    there = member < GROUP
    table = table_ptr + slot.to(tl.int64) * table_stride
    slab = kv_ptr + kv_head * head_stride
    nearest = tl.maximum(oldest, 0)
    home = slab + tl.load(table + position // BLOCK).to(tl.int64) * block_stride
    blocks = tile_blocks(table, begin, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    next_blocks = tile_blocks(table, begin + TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    k, v = _cached(slab, blocks, begin, position, oldest, end, block_stride, kv_stride, d, DIM, BLOCK, TILE)
    next_k, next_v = _cached(slab, next_blocks, begin + TILE, position, oldest, end, block_stride, kv_stride, d, DIM,
                             BLOCK, TILE)
    blocks = tile_blocks(table, begin + 2 * TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    turn = position.to(tl.int64) * HALF + d % HALF
    cos, sin = tl.load(cos_ptr + turn), tl.load(sin_ptr + turn)
    sin = tl.where(d < HALF, -sin, sin)
    # Unused, and then not loaded, unless heads have norms.
    q_norm, other_q_norm = tl.load(q_norm_ptr + d), tl.load(q_norm_ptr + partner)
    k_norm, other_k_norm = tl.load(k_norm_ptr + d), tl.load(k_norm_ptr + partner)
    if EARLY:
        gdc_wait()

    mine = qkv_ptr + row * row_stride
    head = tl.minimum(kv_head * GROUP + member, HEADS - 1)
    heads = mine + head[:, None] * DIM
    q, other_q = tl.load(heads + d[None, :]), tl.load(heads + partner[None, :])
    key = mine + (HEADS + kv_head) * DIM
    new_k, other_k = tl.load(key + d[None, :]), tl.load(key + partner[None, :])
    new_v = tl.load(key + KV_HEADS * DIM + d)
    q = _turned(q, other_q, q_norm, other_q_norm, cos, sin, eps, ROWS, DIM, NORM)
    new_k = _turned(new_k, other_k, k_norm, other_k_norm, cos, sin, eps, 1, DIM, NORM).reshape(DIM)
    if end > position:
        place = home + position % BLOCK * DIM + d
        tl.store(place, new_k)
        tl.store(place + kv_stride, new_v)

    factor = scale * LOG2E
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    state = (highest, weight, acc, highest, weight, acc)  # of the whole, and of the piece that is being read
    state = _take(q, k, v, new_k, new_v, begin, position, oldest, end, factor, state, TILE, WINDOW_PIECE)
    state = _take(q, next_k, next_v, new_k, new_v, begin + TILE, position, oldest, end, factor, state, TILE,
                  WINDOW_PIECE)
    for start in range(begin + 2 * TILE, end, TILE):
        k, v = _cached(slab, blocks, start, position, oldest, end, block_stride, kv_stride, d, DIM, BLOCK, TILE)
        state = _take(q, k, v, new_k, new_v, start, position, oldest, end, factor, state, TILE, WINDOW_PIECE)
        blocks = tile_blocks(table, start + TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
    highest, weight, acc = add_piece(state[0], state[1], state[2], state[3], state[4], state[5])
    place = (((first + part) * KV_HEADS + kv_head) * GROUP + member).to(tl.int64)
    end_piece(highest, weight, acc, place, parts, finished_ptr + slot * KV_HEADS + kv_head,
              (first * KV_HEADS + kv_head) * GROUP, kv_head, there, d, out_ptr + row * (HEADS * DIM), sums_ptr,
              stats_ptr, sinks_ptr, HEADS, GROUP, FEW, DIM, DIM, SINKS, 0)


@triton.jit
def _cached(slab, blocks, start, position, oldest, end, block_stride, kv_stride, d, DIM: tl.constexpr,
            BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load the keys and values of a tile that earlier steps have stored."""
    n = start + tl.arange(0, TILE)
    own = (n >= oldest) & (n < end) & (n < position)
    return load_tile(slab, blocks, start, own, block_stride, kv_stride, d, DIM, DIM, BLOCK, TILE, True)


@triton.jit
def _turned(x, other, norm, other_norm, cos, sin, eps, ROWS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate heads x [ROWS, DIM] as `rope_store` does; `other`: of each dimension the one that it is rotated
    with, `sin`: negative where that is in the upper half.

    Halves are not joined: the compiler has products of what was joined take their inner dimension in another order.
    """
    dtype = x.dtype
    if NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(pairwise_sum(wide * wide, ROWS, DIM) / DIM + eps)[:, None]
        x = scaled(wide, factor, norm.to(tl.float32)[None, :], dtype)
        other = scaled(other.to(tl.float32), factor, other_norm.to(tl.float32)[None, :], dtype)
    cos = tl.broadcast_to(cos[None, :], x.shape)
    return tl.fma(x.to(tl.float32), cos, other.to(tl.float32) * sin[None, :]).to(dtype)


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
