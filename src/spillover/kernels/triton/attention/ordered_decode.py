"""Paged attention of one query per request, in the order of `softmax.py`, divided into programs by `ordered_splits`.

All query heads of a key head form one tile. Where each piece of a sequence has its own program, each program stores its
sums and the last one to complete adds them up in order. Requests with a few new tokens (the end of a prompt whose
beginning is cached, draft tokens to verify) are computed in the same way, with all of their queries in the tile; where
each of their pieces has its own program, a second kernel adds up the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.batch import DecodeScratch
from spillover.kernels.cuda.attention import attend_codes
from spillover.kernels.triton.attention import ordered_splits as splits
from spillover.kernels.triton.attention.ordered_splits import PROGRAMS
from spillover.kernels.triton.attention.ordered_tile import load_scales, load_tile, tile_blocks
from spillover.kernels.triton.attention.softmax import LOG2E, accumulate_tile, add_piece, finish, operand, piece_begins
from spillover.kernels.triton.codes import CODES
from spillover.kernels.triton.launch import NO_FUSION, pdl_options

WARPS = 4
FEW, SOME = 64, range(256, 800)  # numbers of programs for which each prefetches four tiles, not three (H200)
REGISTERS = {3: 168, 4: 255}  # maximum registers per thread, by tiles prefetched; 168 lets three programs share an SM
_FIELDS = tl.constexpr(splits.FIELDS)


def ordered_decode(
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    items: Tensor,
    num_items: Tensor,
    block_table: Tensor,
    block_size: int,
    scratch: DecodeScratch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    kv_dtype: str = "auto",
    requests: int = 1,
) -> None:
    """Fill the rows of `out` [T, H, D] that the first `num_items` [1] of `items` [I, FIELDS] int32 name.

    The launch is tuned for `requests` requests.
    """
    if attend_codes(q, kv_layer, out, items, num_items, block_table, block_size, scratch, scale, window, sinks,
                    kv_dtype, requests):
        return
    _launch(q, kv_layer, out, items, num_items, block_table, block_size, scratch, scale, window, sinks, kv_dtype, 1,
            stages(requests * kv_layer.shape[2], kv_dtype))


def stages(programs: int, kv_dtype: str) -> int:
    """Return the number of tiles to prefetch: more where programs are too few to hide each other's latency, or where
    many of them remain for the last wave."""
    return 4 if kv_dtype == "auto" and (programs <= FEW or programs in SOME) else 3


def ordered_short_chunks(
    q: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    items: Tensor,
    num_items: Tensor,
    block_table: Tensor,
    block_size: int,
    scratch: DecodeScratch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    kv_dtype: str = "auto",
) -> None:
    """Fill the rows of requests with up to QUERIES new tokens; `items`: from `ordered_splits.short_chunk_splits`."""
    _, heads, dim = q.shape
    kv_heads, queries = kv_layer.shape[2], splits.QUERIES
    _launch(q, kv_layer, out, items, num_items, block_table, block_size, scratch, scale, window, sinks, kv_dtype,
            queries, 2)
    group = heads // kv_heads
    _fold_short_chunks[(min(PROGRAMS, items.shape[0] * kv_heads),)](
        out, scratch.sums, scratch.stats, items, num_items, out if sinks is None else sinks, KV_HEADS=kv_heads,
        GROUP=group, FEW=triton.next_power_of_2(group), DIM=dim, PADDED=max(16, triton.next_power_of_2(dim)),
        QUERIES=queries, SINKS=sinks is not None, CODES=CODES[kv_dtype], num_warps=WARPS, **NO_FUSION,
        **pdl_options(q.device),
    )


def _launch(q: Tensor, kv_layer: Tensor, out: Tensor, items: Tensor, num_items: Tensor, block_table: Tensor,
            block_size: int, scratch: DecodeScratch, scale: float, window: int | None, sinks: Tensor | None,
            kv_dtype: str, queries: int, ahead: int) -> None:
    _, heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    group = heads // kv_heads
    rows = max(16, triton.next_power_of_2(group * queries))
    _ordered_decode[(min(PROGRAMS, items.shape[0] * kv_heads),)](
        q, kv_layer, out, scratch.sums, scratch.stats, scratch.finished, items, num_items, block_table,
        out if sinks is None else sinks, q.stride(0), block_table.stride(0), kv_layer.stride(0), kv_layer.stride(1),
        kv_layer.stride(2), scale,
        KV_HEADS=kv_heads, GROUP=group, ROWS=rows, FEW=triton.next_power_of_2(group), DIM=dim,
        PADDED=max(16, triton.next_power_of_2(dim)), BLOCK=block_size, TILE=splits.TILE,
        WINDOW_PIECE=splits.window_piece(window), QUERIES=queries, SINKS=sinks is not None, CODES=CODES[kv_dtype],
        num_warps=WARPS if rows <= 64 else 2 * WARPS, num_stages=ahead,
        maxnreg=REGISTERS[ahead] if queries == 1 and q.element_size() == 2 else None, **NO_FUSION,
        **pdl_options(q.device),
    )


@triton.jit
def _ordered_decode(
    q_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, finished_ptr, items_ptr, num_items_ptr, table_ptr, sinks_ptr,
    q_stride, table_stride, block_stride, kv_stride, head_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW_PIECE: tl.constexpr,
    QUERIES: tl.constexpr, SINKS: tl.constexpr, CODES: tl.constexpr, EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    d = tl.arange(0, PADDED)
    member = tl.arange(0, ROWS)
    query = member // GROUP
    factor = scale * LOG2E
    total = tl.load(num_items_ptr) * KV_HEADS
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        index = work // KV_HEADS
        kv_head = work % KV_HEADS
        item = items_ptr + index * _FIELDS
        row = tl.load(item).to(tl.int64)
        slot = tl.load(item + 1)
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        oldest = tl.load(item + 4)
        nearest = tl.maximum(oldest, 0)
        parts = tl.load(item + 5)
        part = tl.load(item + 6)
        first = tl.load(item + 7)
        count = tl.load(item + 8) if QUERIES > 1 else 1
        head = kv_head * GROUP + member % GROUP  # [ROWS]
        valid = member < count * GROUP
        real = valid[:, None] & (d[None, :] < DIM)
        q = tl.load(q_ptr + (row + query)[:, None] * q_stride + head[:, None] * DIM + d[None, :], mask=real, other=0.0)
        q = operand(q, CODES)
        length = tl.load(item + 9) - count + 1 + query  # [ROWS], number of keys up to and including that of the query
        table = table_ptr + slot.to(tl.int64) * table_stride
        slab = kv_ptr + kv_head * head_stride

        # Sums over all completed pieces, and over the piece that is being read.
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        piece_highest = tl.full([ROWS], float("-inf"), tl.float32)
        piece_weight = tl.zeros([ROWS], tl.float32)
        piece_acc = tl.zeros([ROWS, PADDED], tl.float32)
        blocks = tile_blocks(table, begin, nearest, end, BLOCK, TILE, WINDOW_PIECE)
        for start in range(begin, end, TILE):
            n = start + tl.arange(0, TILE)
            seen = n < end
            if WINDOW_PIECE > 0:
                seen = seen & (n >= oldest)
            visible = seen[None, :]
            if QUERIES > 1:
                visible = visible & (n[None, :] < length[:, None])
                if WINDOW_PIECE > 0:
                    visible = visible & (n[None, :] >= (oldest + query)[:, None])
            k, v = load_tile(slab, blocks, start, seen, block_stride, kv_stride, d, DIM, PADDED, BLOCK, TILE, True)
            key_scales, value_scales = None, None
            if CODES > 0:
                key_scales, value_scales = load_scales(slab, blocks, start, seen, block_stride, kv_stride, DIM, BLOCK,
                                                       TILE, True)
            highest, weight, acc, piece_highest, piece_weight, piece_acc = accumulate_tile(
                q, k, v, visible, key_scales, value_scales, factor, piece_begins(start, WINDOW_PIECE), highest, weight,
                acc, piece_highest, piece_weight, piece_acc, True, CODES)
            blocks = tile_blocks(table, start + TILE, nearest, end, BLOCK, TILE, WINDOW_PIECE)
        highest, weight, acc = add_piece(highest, weight, acc, piece_highest, piece_weight, piece_acc)

        place = (((first + part) * KV_HEADS + kv_head) * (QUERIES * GROUP) + member).to(tl.int64)  # [ROWS]
        if QUERIES > 1:
            if parts == 1:
                _store(highest, weight, acc, head, query * HEADS + head, valid, d, out_ptr + row * (HEADS * DIM),
                       sinks_ptr, DIM, SINKS, CODES)
            else:
                _store_partial(highest, weight, acc, place, valid, d, sums_ptr, stats_ptr, DIM)
        else:
            _end_piece(highest, weight, acc, place, parts, finished_ptr + slot * KV_HEADS + kv_head,
                       (first * KV_HEADS + kv_head) * GROUP, kv_head, valid, d, out_ptr + row * (HEADS * DIM), sums_ptr,
                       stats_ptr, sinks_ptr, HEADS, GROUP, FEW, DIM, PADDED, SINKS, CODES)


@triton.jit
def _end_piece(highest, weight, acc, place, parts, counter, first, kv_head, valid, d, out_ptr, sums_ptr, stats_ptr,
               sinks_ptr, HEADS: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr,
               PADDED: tl.constexpr, SINKS: tl.constexpr, CODES: tl.constexpr):
    """Store the result of a sequence that is one item; otherwise store the sums of a piece at `place` [ROWS], and add
    up all pieces, which begin at `first`, if this is the last piece of its key head to complete."""
    if parts == 1:
        head = kv_head * GROUP + tl.arange(0, highest.shape[0]) % GROUP
        _store(highest, weight, acc, head, head, valid, d, out_ptr, sinks_ptr, DIM, SINKS, CODES)
    else:
        _store_partial(highest, weight, acc, place, valid, d, sums_ptr, stats_ptr, DIM)
        tl.debug_barrier()  # all sums of this program are written before it increments the counter
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            tl.debug_barrier()
            _add_up(sums_ptr, stats_ptr, first, parts, kv_head, d, out_ptr, sinks_ptr, HEADS, GROUP, FEW, DIM, PADDED,
                    SINKS, CODES)


@triton.jit
def _store_partial(highest, weight, acc, place, valid, d, sums_ptr, stats_ptr, DIM: tl.constexpr):
    tl.store(sums_ptr + place[:, None] * DIM + d[None, :], acc, mask=valid[:, None] & (d[None, :] < DIM))
    tl.store(stats_ptr + place * 2, highest, mask=valid)
    tl.store(stats_ptr + place * 2 + 1, weight, mask=valid)


@triton.jit
def _fold_short_chunks(
    out_ptr, sums_ptr, stats_ptr, items_ptr, num_items_ptr, sinks_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, SINKS: tl.constexpr, CODES: tl.constexpr, EARLY: tl.constexpr,
):
    """Add up the pieces of each query and key head; items that are not a first piece, or that are a whole request, are
    skipped."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    total = tl.load(num_items_ptr) * (KV_HEADS * QUERIES)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item = items_ptr + work // (KV_HEADS * QUERIES) * _FIELDS
        kv_head = work % KV_HEADS
        query = work // KV_HEADS % QUERIES
        if (tl.load(item + 5) > 1) & (tl.load(item + 6) == 0) & (query < tl.load(item + 8)):
            row = (tl.load(item) + query).to(tl.int64)
            first = ((tl.load(item + 7) * KV_HEADS + kv_head) * QUERIES + query) * GROUP
            _add_up(sums_ptr, stats_ptr, first, tl.load(item + 5), kv_head, tl.arange(0, PADDED),
                    out_ptr + row * (HEADS * DIM), sinks_ptr, HEADS * QUERIES, GROUP, FEW, DIM, PADDED, SINKS, CODES)


@triton.jit
def _add_up(sums_ptr, stats_ptr, first, parts, kv_head, d, out_ptr, sinks_ptr, STEP: tl.constexpr,
            GROUP: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr,
            CODES: tl.constexpr):
    """Add up the sums that the pieces of a sequence stored for one key head, in order: rows from `first` on, STEP rows
    apart."""
    member = tl.arange(0, FEW)
    valid = member < GROUP
    place = (first + member).to(tl.int64)
    highest = tl.full([FEW], float("-inf"), tl.float32)
    weight = tl.zeros([FEW], tl.float32)
    acc = tl.zeros([FEW, PADDED], tl.float32)
    for piece in range(0, parts, 8):  # loads of eight pieces are in flight at a time
        h0, w0, a0 = _load_partial(sums_ptr, stats_ptr, place, piece < parts, valid, d, DIM)
        h1, w1, a1 = _load_partial(sums_ptr, stats_ptr, place + STEP, piece + 1 < parts, valid, d, DIM)
        h2, w2, a2 = _load_partial(sums_ptr, stats_ptr, place + 2 * STEP, piece + 2 < parts, valid, d, DIM)
        h3, w3, a3 = _load_partial(sums_ptr, stats_ptr, place + 3 * STEP, piece + 3 < parts, valid, d, DIM)
        h4, w4, a4 = _load_partial(sums_ptr, stats_ptr, place + 4 * STEP, piece + 4 < parts, valid, d, DIM)
        h5, w5, a5 = _load_partial(sums_ptr, stats_ptr, place + 5 * STEP, piece + 5 < parts, valid, d, DIM)
        h6, w6, a6 = _load_partial(sums_ptr, stats_ptr, place + 6 * STEP, piece + 6 < parts, valid, d, DIM)
        h7, w7, a7 = _load_partial(sums_ptr, stats_ptr, place + 7 * STEP, piece + 7 < parts, valid, d, DIM)
        highest, weight, acc = add_piece(highest, weight, acc, h0, w0, a0)
        highest, weight, acc = add_piece(highest, weight, acc, h1, w1, a1)
        highest, weight, acc = add_piece(highest, weight, acc, h2, w2, a2)
        highest, weight, acc = add_piece(highest, weight, acc, h3, w3, a3)
        highest, weight, acc = add_piece(highest, weight, acc, h4, w4, a4)
        highest, weight, acc = add_piece(highest, weight, acc, h5, w5, a5)
        highest, weight, acc = add_piece(highest, weight, acc, h6, w6, a6)
        highest, weight, acc = add_piece(highest, weight, acc, h7, w7, a7)
        place += 8 * STEP
    head = kv_head * GROUP + member
    _store(highest, weight, acc, head, head, valid, d, out_ptr, sinks_ptr, DIM, SINKS, CODES)


@triton.jit
def _store(highest, weight, acc, head, place, valid, d, out_ptr, sinks_ptr, DIM: tl.constexpr, SINKS: tl.constexpr,
           CODES: tl.constexpr):
    """Store the results of heads [ROWS] at `place` [ROWS], in units of DIM elements."""
    sink = tl.load(sinks_ptr + head, mask=valid, other=0.0) if SINKS else None
    result = finish(highest, weight, acc, sink, SINKS, CODES)
    tl.store(out_ptr + place[:, None] * DIM + d[None, :], result.to(out_ptr.dtype.element_ty),
             mask=valid[:, None] & (d[None, :] < DIM))


@triton.jit
def _load_partial(sums_ptr, stats_ptr, place, exists, valid, d, DIM: tl.constexpr):
    """Load the sums that a piece stored at `place` [FEW], bypassing L1: another multiprocessor wrote them."""
    wanted = valid & exists
    highest = tl.load(stats_ptr + place * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
    weight = tl.load(stats_ptr + place * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
    acc = tl.load(sums_ptr + place[:, None] * DIM + d[None, :], mask=wanted[:, None] & (d[None, :] < DIM), other=0.0,
                  cache_modifier=".cg")
    return highest, weight, acc
