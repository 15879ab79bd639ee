"""A mixture of experts on a CUDA device, from the router's scores to the weighted sum.

Two paths, chosen by the number of tokens alone:

- up to FEW_TOKENS: a program streams its part of one (token, expert) pair's weights; nothing is sorted, and the second
  product also adds up a token's experts;
- above: pairs are sorted by expert on the device, and the tensor cores multiply tiles of rows that share an expert.

Within a path a row's result depends on that row alone: its sums over k have one order, and its experts are added in the
router's order. Between the paths results differ in rounding: the first rounds share * h to the activations' type and
adds the experts in float32, the second rounds h and each expert's output. Small tiles of unpacked weights use mma.sync
and the others wgmma, whose sums may differ in their last bits. In the largest steps FP8 experts are dequantised first,
which rounds them. A batch-invariant format (`ordered`) uses wgmma only, for which the tile size makes no difference,
dequantises nothing first, and sums and rounds a few tokens as it does many. Where kernels/cuda/mixture.py supports such
a format, both paths use its products.
No shape depends on the routing and the host never waits, so a CUDA graph can contain all of it: grids are sized for the
worst routing, and programs without work return at once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from spillover.kernels.cuda import mixture as cuda
from spillover.kernels.extents import dequantizes
from spillover.kernels.formats.grouped_gemm import GroupedGemm, Tiles
from spillover.kernels.moe.experts import Experts
from spillover.kernels.triton.launch import pdl_options
from spillover.kernels.triton.moe.moe_experts import (
    experts_down_pairs,
    experts_down_tiles,
    experts_gate_up_pairs,
    experts_gate_up_tiles,
)
from spillover.kernels.triton.moe.moe_routing import combine, route, sort_by_expert
from spillover.kernels.triton.moe.moe_widen import allocate_wide, widen

FEW_TOKENS = 8
ARRIVALS = 1 << 16  # maximum number of tokens times tiles of columns


def mixture(
    x: Tensor,
    scores: Tensor,
    first: Experts,
    second: Experts,
    k: int,
    renormalize: bool,
    limit: float | None = None,
    few_tokens: int = FEW_TOKENS,
    tiles: Tiles | None = None,
) -> Tensor:
    """Send each token of x [T, H] through the k experts with its highest scores [T, E] -> [T, H].

    `first` [E, 2I, H] and `second` [E, H, I] are the experts' two products. With a `limit` the activation is the
    clamped SwiGLU, over alternating rows of gate and up; without it SiLU-mul, over all gate rows and then all up rows.
    """
    tokens = x.shape[0]
    if tokens == 0:
        return torch.empty_like(x)
    if tiles is None and wide(x, first.gemm, first.count, k, second.width):
        dense = allocate_wide(first.count, x.shape[1], second.width, x)
        widen(first, second, dense)
        first, second = dense
    gemm = first.gemm if tiles is not None else cuda.cuda_gemm(first.gemm, x, second.width, k)
    ids, shares, x_ready = route(scores, x, k, renormalize, gemm)
    if tokens <= few_tokens and gemm.few is not None:
        return _few(x_ready, ids, shares, first, second, limit, x.dtype, tiles or gemm.few, gemm)
    chosen = tiles or gemm.many_tiles(tokens * k / first.count)
    return _many(x_ready, ids, shares, first, second, limit, x.dtype, chosen, gemm)


def wide(x: Tensor, gemm: GroupedGemm, experts: int, k: int, inner: int) -> bool:
    """Return whether the experts are first dequantised to dense weights for these rows."""
    return gemm.dequantizes and dequantizes(experts, k, 3 * inner * x.shape[1] * x.element_size(), x.shape[0])


def _few(
    x: Tensor, ids: Tensor, shares: Tensor, first: Experts, second: Experts, limit: float | None, dtype: torch.dtype,
    tiles: Tiles, gemm: GroupedGemm,
) -> Tensor:
    h, parts = allocate_pairs(x, ids, gemm.row_width(second.width), dtype if second.gemm.ordered else torch.float32)
    out = torch.empty(ids.shape[0], x.shape[1], dtype=dtype, device=x.device)
    pair_products(x, ids, shares, first, second, limit, tiles, h, parts, out)
    return out


def _many(
    x: Tensor, ids: Tensor, shares: Tensor, first: Experts, second: Experts, limit: float | None, dtype: torch.dtype,
    tiles: Tiles, gemm: GroupedGemm,
) -> Tensor:
    order, places = sort_by_expert(ids, first.count, tiles[0].tokens)
    h, rows = allocate_tiles(x, ids, gemm.row_width(second.width), dtype)
    tile_products(x, order, places, ids.shape[1], first, second, limit, tiles, h, rows)
    return combine(rows, shares, dtype)


def allocate_pairs(x: Tensor, ids: Tensor, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the result of the first product of `pair_products` and, in `dtype`, that of the second."""
    pairs = ids.numel()
    return (torch.empty(pairs, inner, dtype=x.dtype, device=x.device),
            torch.empty(pairs, x.shape[1], dtype=dtype, device=x.device))


def pair_products(
    x: Tensor, ids: Tensor, shares: Tensor, first: Experts, second: Experts, limit: float | None,
    tiles: Tiles, h: Tensor, parts: Tensor, out: Tensor | None, slots: Tensor | None = None,
) -> None:
    """Compute parts[pair] = share * its expert's output for its token, without the share if `first` is ordered, and
    their sums over k into `out` [T, H], if given.

    `slots` int32 [E]: the slot of each expert, if `first` and `second` are stacks of slots. Pairs whose expert is in
    none (-1) are skipped; `out` must be None if there are any.
    """
    if tiles[0].kernel:
        cuda.pair_products(x, ids, shares, first, second, limit, tiles, h, parts, out, slots)
        return
    pairs, k = ids.numel(), ids.shape[1]
    hidden, inner = x.shape[1], second.width
    tile = tiles[0]
    experts_gate_up_pairs[(pairs * triton.cdiv(inner, tile.rows),)](
        x, first.values, _or(first.scales, x), _or(first.bias, x), slots, ids, shares, h, limit or 0.0, hidden,
        HIDDEN=hidden, INNER=inner, TOP_K=k, FORMAT=first.gemm.code, DOWN_FORMAT=second.gemm.code,
        CLAMPED=limit is not None, **_layout(first), ORDERED=first.gemm.ordered, BLOCK_N=tile.rows, BLOCK_K=tile.depth,
        STAGES=tile.stages, num_warps=tile.warps, **pdl_options(x.device),
    )
    tile = tiles[1]
    assert ids.shape[0] * triton.cdiv(hidden, tile.rows) <= ARRIVALS
    experts_down_pairs[(pairs * triton.cdiv(hidden, tile.rows),)](
        h, second.values, _or(second.scales, h), _or(second.bias, h), slots, ids, shares, parts, _arrivals(x.device),
        _or(out, parts), inner,
        HIDDEN=hidden, INNER=inner, TOP_K=k, FORMAT=second.gemm.code, **_layout(second), SUM=out is not None,
        ORDERED=second.gemm.ordered, BLOCK_N=tile.rows, BLOCK_K=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
        **pdl_options(x.device),
    )


def allocate_tiles(x: Tensor, ids: Tensor, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the result of the first product of `tile_products` and, in `dtype`, that of the second."""
    pairs = ids.numel()
    return (torch.empty(pairs, inner, dtype=x.dtype, device=x.device),
            torch.empty(pairs, x.shape[1], dtype=dtype, device=x.device))


def tile_products(
    x: Tensor, order: Tensor, places: Tensor, k: int, first: Experts, second: Experts, limit: float | None,
    tiles: Tiles, h: Tensor, rows: Tensor, slots: Tensor | None = None,
) -> None:
    """Compute rows[pair] = its expert's output for its token; `order` and `places` are those of `sort_by_expert`.

    `slots` int32 [E]: as in `pair_products`.
    """
    if tiles[0].kernel:
        cuda.tile_products(x, order, places, k, first, second, limit, tiles, h, rows, slots)
        return
    hidden, inner = x.shape[1], second.width
    tile = tiles[0]
    assert tile.tokens == tiles[1].tokens, "both products go over the same tiles"
    experts_gate_up_tiles[(len(places) * triton.cdiv(inner, tile.rows),)](
        x, first.values, _or(first.scales, x), _or(first.bias, x), slots, places, order, h, limit or 0.0, hidden,
        HIDDEN=hidden, INNER=inner, TOP_K=k, FORMAT=first.gemm.code, DOWN_FORMAT=second.gemm.code,
        CLAMPED=limit is not None, **_layout(first), TILE=tile.tokens, BLOCK_N=tile.rows,
        BLOCK_K=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
    )
    tile = tiles[1]
    experts_down_tiles[(len(places) * triton.cdiv(hidden, tile.rows),)](
        h, second.values, _or(second.scales, h), _or(second.bias, h), slots, places, order, rows, inner,
        HIDDEN=hidden, INNER=inner, FORMAT=second.gemm.code, **_layout(second),
        TILE=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
    )


def _layout(stack: Experts) -> dict[str, int | bool]:
    """Return whether a stack has biases, and the strides between its experts, as constants for the compiler."""
    return {
        "BIAS": stack.bias is not None,
        "W_STRIDE": stack.values.stride(0),
        "SCALE_STRIDE": 0 if stack.scales is None else stack.scales.stride(0),
        "BIAS_STRIDE": 0 if stack.bias is None else stack.bias.stride(0),
    }


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters of `experts_down_pairs`: every launch leaves them at zero. Launches must not run
    concurrently."""
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `tensor`, or `other` as a pointer that the kernel needs but does not read."""
    return other if tensor is None else tensor
