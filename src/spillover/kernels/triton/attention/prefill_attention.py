"""Paged attention of many queries a request, over whatever of it is cached: tiles of queries against tiles of keys.

Keys are taken in tiles that begin at the same positions whatever the chunk, so a row's sums do not depend on how its
prompt was cut.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.triton.attention import attention_splits as splits
from spillover.kernels.triton.attention.decode_attention import scales
from spillover.kernels.triton.codes import CODES, decode

# Keys a tile, and warps: those that are faster where programs are few, and where they are many.
TILE, MANY_TILE = (128, 8), (64, 4)
MANY = 264  # programs that have rows
STAGES = 3
_LOG2E = tl.constexpr(1.4426950408889634)


def prefill_attention(
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
    """Fill the rows of `out` [T, H, D] that `tiles` [tiles, 2] int32 name: a request without rows has nothing to do."""
    _, heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    count = tiles.shape[0]
    if count == 0:
        return
    wide = q.element_size() == 4
    busy = min(count, triton.cdiv(q.shape[0], splits.QUERIES)) * heads
    keys, warps = TILE if kv_dtype != "auto" or busy < MANY else MANY_TILE
    _prefill_attention[(heads, count)](
        q, kv_layer, out, tiles, query_start, seq_lens, query_start if slots is None else slots, block_table,
        out if sinks is None else sinks, q.stride(0), block_table.stride(0), kv_layer.stride(0), kv_layer.stride(1),
        kv_layer.stride(2), scale,
        GROUP=heads // kv_heads, DIM=dim, PADDED=max(16, triton.next_power_of_2(dim)), BLOCK=block_size,
        QUERIES=splits.QUERIES, KEYS=keys, WINDOW=window or 0, SINKS=sinks is not None, SLOTS=slots is not None,
        CODES=CODES[kv_dtype], num_warps=warps, num_stages=1 if wide else STAGES,
    )


@triton.jit
def _prefill_attention(
    q_ptr, kv_ptr, out_ptr, tiles_ptr, query_start_ptr, seq_lens_ptr, slots_ptr, table_ptr, sinks_ptr,
    q_stride, table_stride, block_stride, kv_stride, head_stride, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SLOTS: tl.constexpr, CODES: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(tiles_ptr + tile * 2)
    offset = tl.load(tiles_ptr + tile * 2 + 1)
    first_row = tl.load(query_start_ptr + request)
    count = tl.load(query_start_ptr + request + 1) - first_row
    length = tl.load(seq_lens_ptr + request)
    cached = length - count
    m = offset + tl.arange(0, QUERIES)
    position = cached + m  # [QUERIES]
    d = tl.arange(0, PADDED)
    real = (m < count)[:, None] & (d < DIM)[None, :]
    rows = (first_row + m).to(tl.int64)
    q = tl.load(q_ptr + rows[:, None] * q_stride + head * DIM + d[None, :], mask=real, other=0.0)
    table = table_ptr + (tl.load(slots_ptr + request) if SLOTS else request).to(tl.int64) * table_stride
    slab = kv_ptr + (head // GROUP) * head_stride

    factor = scale * _LOG2E
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PADDED], tl.float32)
    end = tl.minimum(cached + offset + QUERIES, length)
    begin = tl.maximum(cached + offset - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else 0
    # Tiles of keys that every row sees need no mask; with a window there are too few of them to treat apart.
    whole = (cached + offset + 1) // KEYS * KEYS if WINDOW == 0 else begin
    for start in range(begin, whole, KEYS):
        highest, weight, acc = _take(
            q, slab, table, start, position, end, block_stride, kv_stride, factor, highest, weight, acc, d,
            DIM, PADDED, BLOCK, KEYS, 0, False, CODES)
    for start in range(whole, end, KEYS):
        highest, weight, acc = _take(
            q, slab, table, start, position, end, block_stride, kv_stride, factor, highest, weight, acc, d,
            DIM, PADDED, BLOCK, KEYS, WINDOW, True, CODES)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        higher = tl.maximum(highest, sink)
        weight = weight * tl.exp2(highest - higher) + tl.exp2(sink - higher)
        acc *= tl.exp2(highest - higher)[:, None]
    result = acc / weight[:, None]
    out = out_ptr + rows[:, None] * (tl.num_programs(0) * DIM) + head * DIM + d[None, :]
    tl.store(out, result.to(q.dtype), mask=real)


@triton.jit
def _take(
    q, slab, table, start, position, end, block_stride, kv_stride, factor, highest, weight, acc, d,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, CODES: tl.constexpr,
):
    """Take one tile of keys into the running softmax."""
    RUN: tl.constexpr = BLOCK if BLOCK < KEYS else KEYS
    n = start + tl.arange(0, KEYS)
    seen = n < end
    block = tl.load(table + n // BLOCK, mask=seen, other=0).to(tl.int64)
    inside = block * block_stride + n % BLOCK  # [KEYS]
    # Keys are read without a mask, which would cut the vectors: what is not seen gets no score.
    places = tl.max_contiguous(tl.multiple_of(inside[None, :] + d[:, None] * BLOCK, [1, RUN]), [1, RUN])
    values = block * block_stride + kv_stride + (n % BLOCK) * DIM
    if DIM == PADDED:
        k = tl.load(slab + places)  # [PADDED, KEYS]
    else:
        k = tl.load(slab + places, mask=d[:, None] < DIM, other=0)
    if MASKED or DIM < PADDED:
        v = tl.load(slab + values[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0)
    else:
        v = tl.load(slab + values[:, None] + d[None, :])
    if CODES > 0:
        k = decode(k, q.dtype, CODES)
        v = decode(v, q.dtype, CODES)
    scores = tl.dot(q, k, input_precision="ieee")  # [QUERIES, KEYS]
    if CODES > 0:
        scores *= scales(slab, block * block_stride, n % BLOCK, seen, BLOCK, DIM)[None, :]
    if MASKED:
        visible = (n[None, :] <= position[:, None]) & seen[None, :]
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        highest_here = tl.max(tl.where(visible, scores, float("-inf")), 1)
    else:
        highest_here = tl.max(scores, 1)
    higher = tl.maximum(highest, highest_here * factor)
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
    else:
        base = higher
    shrink = tl.exp2(highest - base)
    # Said as one operation, so that it is rounded alike with a mask and without.
    p = tl.exp2(tl.fma(scores, factor + tl.zeros_like(scores), -base[:, None] + tl.zeros_like(scores)))
    if MASKED:
        p = tl.where(visible, p, 0.0)
    weight = weight * shrink + tl.sum(p, 1)
    if CODES > 0:
        p *= scales(slab + kv_stride, block * block_stride, n % BLOCK, seen, BLOCK, DIM)[None, :]
    acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, weight, acc
