"""Routing of tokens to experts, the order of their rows when grouped by expert, and the weighted sum of the experts.

All of it is on the device: nothing here waits for the host or makes a shape depend on the routing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.formats.grouped_gemm import GroupedGemm
from spillover.kernels.triton.launch import pdl_options
from spillover.kernels.triton.moe.moe_product import activation_columns, activation_values

_COLUMNS = 512  # columns of activations that one program of the routing copies
_CHUNK = 4096  # pairs that a program of the sort processes per iteration


def route(
    scores: Tensor, x: Tensor, k: int, renormalize: bool, gemm: GroupedGemm,
    replay: Tensor | None = None, replay_at: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Route scores [T, E], x [T, H] -> (ids [T, k] int32, shares [T, k] float32, x in the first product's layout).

    Of equal scores the lower id comes first. Shares are those of a softmax over all experts; `renormalize` scales the
    shares of the chosen ones to add up to one, which is a softmax over these alone. `replay` int32 [N, k] with
    `replay_at` int32 [T], or [1] for all rows: the ids of row t are replay[replay_at[t] % N] instead.
    """
    tokens, experts = scores.shape
    ids = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    shares = torch.empty(tokens, k, dtype=torch.float32, device=x.device)
    copied = gemm.input_dtypes is not None
    hidden = x.shape[1]
    width = gemm.row_width(hidden)
    ready = x if gemm.input_dtypes is None else torch.empty(
        tokens, width, dtype=gemm.input_dtypes.get(x.dtype, x.dtype), device=x.device)[:, :hidden]
    _route[(tokens, 1 + triton.cdiv(width, _COLUMNS) if copied else 1)](
        scores, x, ids, shares, ready, replay, replay_at, scores.stride(0), x.stride(0),
        None if replay is None else replay.shape[0], None if replay is None else replay.stride(0),
        SHARED_PLACE=replay_at is None or len(replay_at) == 1,
        EXPERTS=experts, PADDED=triton.next_power_of_2(experts), K=k, PADDED_K=triton.next_power_of_2(k),
        RENORMALIZE=renormalize, HIDDEN=hidden, WIDTH=width, COLUMNS=_COLUMNS, FORMAT=gemm.code, num_warps=1,
        **pdl_options(x.device),
    )
    return ids, shares, ready


def sort_by_expert(ids: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """Sort ids [T, k] -> (order, tiles): the pairs t * k + j by expert, and their division into tiles.

    tiles [most, 3] int32: expert, first position, end of the expert's positions. A tile has up to `tile` positions of
    one expert; the expert is -1 in unused entries, as the array is sized for the worst routing.
    """
    pairs = ids.numel()
    most = most_tiles(pairs, experts, tile)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(most, 3, dtype=torch.int32, device=ids.device)
    padded = triton.next_power_of_2(experts)
    chunk = min(_CHUNK, max(triton.next_power_of_2(pairs), 128))
    _sort[(experts,)](
        ids, order, tiles, pairs, most, EXPERTS=experts, PADDED=padded, TILE=tile, CHUNK=chunk,
        num_warps=4 if chunk <= 1024 else 8,
    )
    return order, tiles


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the maximum number of tiles over all routings of n pairs: the last tile of each expert may be partial."""
    return min(pairs, pairs // tile + min(experts, pairs))


def count_by_rank(ids: Tensor, each: int, rows: Tensor) -> None:
    """Add to `rows` int64 [ranks] the number of ids [T, k] that belong to each rank; a rank has `each` experts."""
    pairs = ids.numel()
    _count_by_rank[(len(rows),)](ids, rows, pairs, EACH=each, CHUNK=min(_CHUNK, triton.next_power_of_2(pairs)),
                                 num_warps=4)


def combine(rows: Tensor, shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over j, in its order, of shares[t, j] * rows[t * k + j]; rows [T * k, H], shares [T, k]."""
    tokens, k = shares.shape
    hidden = rows.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=rows.device)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](rows, shares, out, hidden, K=k, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _route(
    scores_ptr, x_ptr, ids_ptr, shares_ptr, ready_ptr, replay_ptr, replay_at_ptr, scores_stride, x_stride,
    replayed_steps, replay_stride, SHARED_PLACE: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Route: the first program of a token chooses its experts, the others copy its activations."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) > 0:
        column = (tl.program_id(1) - 1) * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + token * x_stride + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        place = ready_ptr + token * WIDTH + activation_columns(column, HIDDEN, FORMAT)
        tl.store(place, activation_values(x, ready_ptr.dtype.element_ty, FORMAT), mask=column < WIDTH)
        return
    expert = tl.arange(0, PADDED)
    scores = tl.load(scores_ptr + token * scores_stride + expert, mask=expert < EXPERTS, other=float("-inf"))
    scores = scores.to(tl.float32)
    slot = tl.arange(0, PADDED_K)
    if replay_ptr is not None:
        at = tl.load(replay_at_ptr + (0 if SHARED_PLACE else token))
        row = (at % replayed_steps).to(tl.int64) * replay_stride
        chosen = tl.load(replay_ptr + row + slot, mask=slot < K, other=0)
        best = tl.load(scores_ptr + token * scores_stride + chosen, mask=slot < K, other=float("-inf")).to(tl.float32)
    else:
        best = tl.full((PADDED_K,), float("-inf"), tl.float32)
        chosen = tl.zeros((PADDED_K,), tl.int32)
        remaining = scores
        for j in tl.static_range(K):
            value, index = tl.max(remaining, 0, return_indices=True, return_indices_tie_break_left=True)
            best = tl.where(slot == j, value, best)
            chosen = tl.where(slot == j, tl.minimum(index, EXPERTS - 1), chosen)  # with NaN the index is out of range
            remaining = tl.where(expert == index, float("-inf"), remaining)
    top = tl.max(best, 0)
    shares = tl.exp(best - top)  # slots past K: 0
    if RENORMALIZE:
        shares = shares / tl.sum(shares, 0)
    else:
        shares = shares / tl.sum(tl.exp(scores - top), 0)
    tl.store(ids_ptr + token * K + slot, chosen, mask=slot < K)
    tl.store(shares_ptr + token * K + slot, shares, mask=slot < K)


@triton.jit
def _sort(
    ids_ptr, order_ptr, tiles_ptr, pairs, most,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):
    """Sort with one program per expert: it counts all experts' pairs, then writes the pairs and tiles of its expert."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, PADDED)
    counts = tl.zeros((PADDED,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + lane
        counts += tl.histogram(tl.load(ids_ptr + pair, mask=pair < pairs, other=0), PADDED, mask=pair < pairs)
    tiles = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    for index in range((count + TILE - 1) // TILE):
        entry = tiles_ptr + (first_tile + index) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, first + index * TILE)
        tl.store(entry + 2, first + count)
    # Every program marks a part of the unused tiles.
    total = tl.sum(tiles, 0)
    for index in range(total + expert, most, EXPERTS):
        tl.store(tiles_ptr + index * 3, -1)
    written = first
    for start in range(0, pairs, CHUNK):
        pair = start + lane
        selected = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(selected.to(tl.int32), 0)
        tl.store(order_ptr + written + rank - 1, pair, mask=selected)
        written += tl.max(rank, 0)


@triton.jit
def _count_by_rank(ids_ptr, rows_ptr, pairs, EACH: tl.constexpr, CHUNK: tl.constexpr):
    rank = tl.program_id(0)
    total = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        total += (tl.load(ids_ptr + pair, mask=pair < pairs, other=-EACH) // EACH == rank).to(tl.int32)
    tl.store(rows_ptr + rank, tl.load(rows_ptr + rank) + tl.sum(total, 0))


@triton.jit
def _combine(rows_ptr, shares_ptr, out_ptr, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(rows_ptr + (token * K + j) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(row, tl.load(shares_ptr + token * K + j) + tl.zeros_like(row), total)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)
