"""Paged attention of many queries per request, in the order of `softmax.py`: tiles of queries against tiles of keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.cuda.attention import attend_prompts
from spillover.kernels.cuda.attention_prefill import attend_prefill
from spillover.kernels.triton.attention import ordered_splits as splits
from spillover.kernels.triton.attention.ordered_splits import TILE_QUERIES
from spillover.kernels.triton.attention.ordered_tile import load_scales, load_tile, tile_blocks
from spillover.kernels.triton.attention.softmax import LOG2E, accumulate_tile, add_piece, finish, operand, piece_begins
from spillover.kernels.triton.codes import CODES
from spillover.kernels.triton.launch import NO_FUSION

# Queries per program, warps and stages. Small programs share a multiprocessor: one multiplies while the other computes
# exponentials. Each program converts KV codes itself, so with codes it has more queries to use them for.
SMALL, LARGE = (64, 4, 2), (128, 8, 3)
TINY = (32, 4, 2)  # for codes of heads of less than 64 dimensions, whose larger tiles Triton 3.6 compiles wrongly
FEW = 264  # up to this number of programs each prefetches AHEAD tiles, as no other program hides its latency
AHEAD = 4


def ordered_prefill(
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    tiles: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    block_table: Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    kv_dtype: str = "auto",
) -> None:
    """Fill the rows of `out` [T, H, D] that `tiles` [tiles, 2] int32 name; a request may have no rows."""
    _, heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    count = tiles.shape[0]
    given = (q, kv_layer, out, tiles, query_start, seq_lens, slots, block_table, block_size, scale, window, sinks,
             kv_dtype)
    if count == 0 or attend_prompts(*given) or attend_prefill(*given):
        return
    wide = q.element_size() == 4
    queries, warps, stages = SMALL if kv_dtype == "auto" and not wide else LARGE if wide or dim >= 64 else TINY
    parts = count * (TILE_QUERIES // queries)
    if heads * parts <= FEW and kv_dtype == "auto" and dim <= 128:
        stages = AHEAD
    _ordered_prefill[(heads, parts)](
        q, kv_layer, out, tiles, query_start, seq_lens, query_start if slots is None else slots, block_table,
        out if sinks is None else sinks, q.stride(0), block_table.stride(0), kv_layer.stride(0), kv_layer.stride(1),
        kv_layer.stride(2), scale,
        GROUP=heads // kv_heads, DIM=dim, PADDED=max(16, triton.next_power_of_2(dim)), BLOCK=block_size,
        TILE_QUERIES=TILE_QUERIES, QUERIES=queries, TILE=splits.TILE, WINDOW=window or 0,
        WINDOW_PIECE=splits.window_piece(window), SINKS=sinks is not None, SLOTS=slots is not None,
        CODES=CODES[kv_dtype], num_warps=warps, num_stages=1 if wide else stages, **NO_FUSION,
    )


@triton.jit
def _ordered_prefill(
    q_ptr, kv_ptr, out_ptr, tiles_ptr, query_start_ptr, seq_lens_ptr, slots_ptr, table_ptr, sinks_ptr,
    q_stride, table_stride, block_stride, kv_stride, head_stride, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    WINDOW_PIECE: tl.constexpr, SINKS: tl.constexpr, SLOTS: tl.constexpr, CODES: tl.constexpr,
):
    head = tl.program_id(0)
    part = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last rows take longest: they are first
    PARTS: tl.constexpr = TILE_QUERIES // QUERIES
    request = tl.load(tiles_ptr + part // PARTS * 2)
    offset = tl.load(tiles_ptr + part // PARTS * 2 + 1) + part % PARTS * QUERIES
    first_row = tl.load(query_start_ptr + request)
    count = tl.load(query_start_ptr + request + 1) - first_row
    if offset >= count:
        return
    length = tl.load(seq_lens_ptr + request)
    cached = length - count
    m = offset + tl.arange(0, QUERIES)
    position = cached + m  # [QUERIES]
    d = tl.arange(0, PADDED)
    real = (m < count)[:, None] & (d < DIM)[None, :]
    rows = (first_row + m).to(tl.int64)
    q = tl.load(q_ptr + rows[:, None] * q_stride + head * DIM + d[None, :], mask=real, other=0.0)
    q = operand(q, CODES)
    table = table_ptr + (tl.load(slots_ptr + request) if SLOTS else request).to(tl.int64) * table_stride
    slab = kv_ptr + (head // GROUP) * head_stride

    factor = scale * LOG2E
    # Sums over all completed pieces, and over the piece that is being read.
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PADDED], tl.float32)
    piece_highest = tl.full([QUERIES], float("-inf"), tl.float32)
    piece_weight = tl.zeros([QUERIES], tl.float32)
    piece_acc = tl.zeros([QUERIES, PADDED], tl.float32)
    end = tl.minimum(cached + offset + QUERIES, length)
    oldest = tl.maximum(cached + offset - WINDOW + 1, 0) if WINDOW > 0 else 0
    begin = oldest // TILE * TILE
    # Tiles of keys that every row sees need no mask; with a window there are too few of them for a separate loop.
    whole = (cached + offset + 1) // TILE * TILE if WINDOW == 0 else begin
    blocks = tile_blocks(table, begin, oldest, end, BLOCK, TILE, WINDOW)
    for start in range(begin, whole, TILE):
        highest, weight, acc, piece_highest, piece_weight, piece_acc = _accumulate_tile(
            q, slab, blocks, start, position, oldest, end, block_stride, kv_stride, factor, highest, weight, acc,
            piece_highest, piece_weight, piece_acc, d, DIM, PADDED, BLOCK, TILE, 0, WINDOW_PIECE, False, CODES)
        blocks = tile_blocks(table, start + TILE, oldest, end, BLOCK, TILE, WINDOW)
    for start in range(whole, end, TILE):
        highest, weight, acc, piece_highest, piece_weight, piece_acc = _accumulate_tile(
            q, slab, blocks, start, position, oldest, end, block_stride, kv_stride, factor, highest, weight, acc,
            piece_highest, piece_weight, piece_acc, d, DIM, PADDED, BLOCK, TILE, WINDOW, WINDOW_PIECE, True, CODES)
        blocks = tile_blocks(table, start + TILE, oldest, end, BLOCK, TILE, WINDOW)
    highest, weight, acc = add_piece(highest, weight, acc, piece_highest, piece_weight, piece_acc)
    sink = tl.load(sinks_ptr + head) + tl.zeros([QUERIES], sinks_ptr.dtype.element_ty) if SINKS else None
    result = finish(highest, weight, acc, sink, SINKS, CODES)
    out = out_ptr + rows[:, None] * (tl.num_programs(0) * DIM) + head * DIM + d[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _accumulate_tile(
    q, slab, blocks, start, position, oldest, end, block_stride, kv_stride, factor, highest, weight, acc,
    piece_highest, piece_weight, piece_acc, d,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    WINDOW_PIECE: tl.constexpr, MASKED: tl.constexpr, CODES: tl.constexpr,
):
    """Add one tile of keys to the sums of a piece; where a piece begins, first add the previous one to the total."""
    n = start + tl.arange(0, TILE)
    valid = None
    if MASKED:
        valid = (n >= oldest) & (n < end) if WINDOW > 0 else n < end
    k, v = load_tile(slab, blocks, start, valid, block_stride, kv_stride, d, DIM, PADDED, BLOCK, TILE, MASKED)
    key_scales, value_scales = None, None
    if CODES > 0:
        key_scales, value_scales = load_scales(slab, blocks, start, valid, block_stride, kv_stride, DIM, BLOCK, TILE,
                                               MASKED)
    visible = None
    if MASKED:
        visible = n[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
    return accumulate_tile(
        q, k, v, visible, key_scales, value_scales, factor, piece_begins(start, WINDOW_PIECE), highest, weight, acc,
        piece_highest, piece_weight, piece_acc, MASKED, CODES)
