"""The two products of a mixture's MLP: over tiles of rows that share an expert, or one row per program for few tokens.

Experts are stored in a stack, W_STRIDE, SCALE_STRIDE and BIAS_STRIDE elements apart. Where `slots_ptr` is given the
stack is indexed by slot, slots[expert] is the slot of an expert, and pairs whose expert is in none (-1) are skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.moe.moe_product import (
    FP8,
    FP8_BLOCK,
    activation_columns,
    activation_values,
    product,
    row_product,
)

ALPHA = tl.constexpr(1.702)  # equal to kernels.activation.SWIGLU_ALPHA


@triton.jit
def experts_gate_up_tiles(
    x_ptr, w_ptr, scale_ptr, bias_ptr, slots_ptr, tiles_ptr, order_ptr, h_ptr, limit, k_end,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, DOWN_FORMAT: tl.constexpr,
    CLAMPED: tl.constexpr, BIAS: tl.constexpr, W_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute the first product with its activation: h[position] = act(gate_up[expert] @ x[token] + bias)."""
    n_tiles: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0) // n_tiles
    first_column = tl.program_id(0) % n_tiles * BLOCK_N
    expert = tl.load(tiles_ptr + place * 3)
    if expert < 0:
        return
    if slots_ptr is not None:
        expert = tl.load(slots_ptr + expert)
        if expert < 0:
            return
    expert = expert.to(tl.int64)
    position = tl.load(tiles_ptr + place * 3 + 1) + tl.arange(0, TILE)
    inside = position < tl.load(tiles_ptr + place * 3 + 2)
    token = tl.load(order_ptr + position, mask=inside, other=0) // TOP_K
    w_rows, scale_rows = _gate_up_rows(first_column, INNER, CLAMPED, FORMAT, BLOCK_N)
    total = tl.zeros((2 * BLOCK_N, TILE), tl.float32)
    total = product(
        total, x_ptr, token, inside, w_ptr + expert * W_STRIDE, scale_ptr + expert * SCALE_STRIDE, w_rows, scale_rows,
        k_end, HIDDEN, FORMAT, 2 * BLOCK_N, TILE, BLOCK_K, STAGES,
    )
    if BIAS:
        total += tl.load(bias_ptr + expert * BIAS_STRIDE + w_rows).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_N, 2, TILE)), (0, 2, 1)))  # [BLOCK_N, TILE]
    h = activation_values(_gated(gate, up, limit, CLAMPED), h_ptr.dtype.element_ty, DOWN_FORMAT)
    columns = first_column + tl.arange(0, BLOCK_N)
    at = position.to(tl.int64)[None, :] * INNER + activation_columns(columns, INNER, DOWN_FORMAT)[:, None]
    tl.store(h_ptr + at, h, mask=inside[None, :] & (columns < INNER)[:, None])


@triton.jit
def experts_gate_up_pairs(
    x_ptr, w_ptr, scale_ptr, bias_ptr, slots_ptr, ids_ptr, shares_ptr, h_ptr, limit, k_end,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, DOWN_FORMAT: tl.constexpr,
    CLAMPED: tl.constexpr, BIAS: tl.constexpr, W_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr, ORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):
    """Compute the first product with its activation, for one token and one expert: h[pair] = share * act(...).

    With ORDERED the second product applies the shares, as `combine` does after `experts_gate_up_tiles`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n_tiles: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // n_tiles
    first_column = tl.program_id(0) % n_tiles * BLOCK_N
    expert = tl.load(ids_ptr + pair)
    if slots_ptr is not None:
        expert = tl.load(slots_ptr + expert)
        if expert < 0:
            return
    expert = expert.to(tl.int64)
    w_rows, scale_rows = _gate_up_rows(first_column, INNER, CLAMPED, FORMAT, BLOCK_N)
    total = row_product(
        x_ptr, pair // TOP_K, w_ptr + expert * W_STRIDE, scale_ptr + expert * SCALE_STRIDE, w_rows, scale_rows, k_end,
        HIDDEN, FORMAT, 2 * BLOCK_N, BLOCK_K, STAGES, ORDERED,
    )
    if BIAS:
        total += tl.load(bias_ptr + expert * BIAS_STRIDE + w_rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, (BLOCK_N, 2)))
    h = _gated(gate, up, limit, CLAMPED)
    if not ORDERED:
        h *= tl.load(shares_ptr + pair)
    columns = first_column + tl.arange(0, BLOCK_N)
    at = pair.to(tl.int64) * INNER + activation_columns(columns, INNER, DOWN_FORMAT)
    tl.store(h_ptr + at, activation_values(h, h_ptr.dtype.element_ty, DOWN_FORMAT), mask=columns < INNER)


@triton.jit
def experts_down_tiles(
    h_ptr, w_ptr, scale_ptr, bias_ptr, slots_ptr, tiles_ptr, order_ptr, out_ptr, k_end,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, W_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute the second product: out[pair] = down[expert] @ h[position] + bias."""
    n_tiles: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0) // n_tiles
    column = tl.program_id(0) % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(tiles_ptr + place * 3)
    if expert < 0:
        return
    if slots_ptr is not None:
        expert = tl.load(slots_ptr + expert)
        if expert < 0:
            return
    expert = expert.to(tl.int64)
    position = tl.load(tiles_ptr + place * 3 + 1) + tl.arange(0, TILE)
    inside = position < tl.load(tiles_ptr + place * 3 + 2)
    w_rows = tl.minimum(column, HIDDEN - 1)
    total = tl.zeros((BLOCK_N, TILE), tl.float32)
    total = product(
        total, h_ptr, tl.where(inside, position, 0), inside, w_ptr + expert * W_STRIDE,
        scale_ptr + expert * SCALE_STRIDE, w_rows,
        w_rows // FP8_BLOCK if FORMAT == FP8 else w_rows, k_end, INNER, FORMAT, BLOCK_N, TILE, BLOCK_K, STAGES,
    )
    if BIAS:
        total += tl.load(bias_ptr + expert * BIAS_STRIDE + w_rows).to(tl.float32)[:, None]
    pair = tl.load(order_ptr + position, mask=inside, other=0).to(tl.int64)
    at = pair[None, :] * HIDDEN + column[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside[None, :] & (column < HIDDEN)[:, None])


@triton.jit
def experts_down_pairs(
    h_ptr, w_ptr, scale_ptr, bias_ptr, slots_ptr, ids_ptr, shares_ptr, parts_ptr, arrived_ptr, out_ptr, k_end,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr,
    W_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, SUM: tl.constexpr,
    ORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):
    """Compute the second product for one token and one expert; with SUM the last program adds up the token's experts.

    They are added in the router's order whichever program is last. h is already multiplied by the shares; with ORDERED
    it is not, nor are the parts, and the sum is that of `combine`. `arrived` counts the completed programs of a token's
    columns; it is zero before and after. Without SUM the parts are not added up, as is required where some expert has
    no slot.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n_tiles: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // n_tiles
    tile = tl.program_id(0) % n_tiles
    token = pair // TOP_K
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    w_rows = tl.minimum(column, HIDDEN - 1)
    expert = tl.load(ids_ptr + pair)
    if slots_ptr is not None:
        expert = tl.load(slots_ptr + expert)
        if expert < 0:
            return
    expert = expert.to(tl.int64)
    total = row_product(
        h_ptr, pair, w_ptr + expert * W_STRIDE, scale_ptr + expert * SCALE_STRIDE, w_rows,
        w_rows // FP8_BLOCK if FORMAT == FP8 else w_rows, k_end, INNER, FORMAT, BLOCK_N, BLOCK_K, STAGES,
        ORDERED,
    )
    if BIAS:
        bias = tl.load(bias_ptr + expert * BIAS_STRIDE + w_rows).to(tl.float32)
        total += bias if ORDERED else bias * tl.load(shares_ptr + pair)
    tl.store(parts_ptr + pair.to(tl.int64) * HIDDEN + column, total.to(parts_ptr.dtype.element_ty), mask=inside)
    if SUM:
        tl.debug_barrier()  # all threads have stored before the program increments the counter
        counter = arrived_ptr + token * n_tiles + tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == TOP_K - 1:
            total = tl.zeros((BLOCK_N,), tl.float32)
            for j in tl.static_range(TOP_K):
                place = parts_ptr + (token * TOP_K + j).to(tl.int64) * HIDDEN + column
                part = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
                if ORDERED:
                    total = tl.fma(part, tl.load(shares_ptr + token * TOP_K + j) + tl.zeros_like(part), total)
                else:
                    total += part
            tl.store(out_ptr + token.to(tl.int64) * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


@triton.jit
def _gate_up_rows(
    first_column, INNER: tl.constexpr, CLAMPED: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the rows of weights and of scales for BLOCK_N columns of h, in the order gate, up, gate, up."""
    row = tl.arange(0, 2 * BLOCK_N)
    column = tl.minimum(first_column + row // 2, INNER - 1)
    if CLAMPED:  # gate and up rows alternate in the checkpoint too
        w_rows = 2 * column + row % 2
    else:
        w_rows = row % 2 * INNER + column
    if FORMAT == FP8:
        scale_rows = row % 2 * ((INNER + FP8_BLOCK - 1) // FP8_BLOCK) + column // FP8_BLOCK
    else:
        scale_rows = w_rows
    return w_rows, scale_rows


@triton.jit
def _gated(gate, up, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        h = (up + 1) * (gate * tl.sigmoid(gate * ALPHA))
    else:
        h = gate * tl.sigmoid(gate) * up
    return h
