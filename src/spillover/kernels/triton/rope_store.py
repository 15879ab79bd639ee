"""All operations between the QKV product and attention, in one pass: q/k norm, rotation, and the store into the pool.

Queries are rotated in place; keys and values are written directly to their blocks and nowhere else. A program processes
one head of a few tokens, or several heads in sequence: adjacent tokens of a prompt are adjacent in a block, also where
its keys are stored by dimension.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.attention.ordered_tile import keys_by_token
from spillover.kernels.triton.codes import CODES, encode
from spillover.kernels.triton.launch import NO_FUSION, pdl_options
from spillover.kernels.triton.norm import pairwise_sum, scaled

TOKENS = 16  # tokens per program
WARPS = 4
TOGETHER = 4  # maximum number of heads per program in steps of at least MANY tokens: it loads their rotation once
MANY = 1024


def norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rows: Tensor,
    slots: Tensor | None,
    block_table: Tensor,
    kv_layer: Tensor,
    block_size: int,
    num_heads: int,
    kv_dtype: str = "auto",
    prompts: bool = True,
) -> None:
    """Normalise and rotate the H queries of qkv [T, H + 2 Hk, D] in place; store keys and values at their positions.

    `rows` [T] is the request of each row, `slots` the request's row of the block table (None: the request's index);
    `prompts`: whether some of the rows are adjacent in a sequence, for which the launch is then tuned.
    """
    tokens, heads, dim = qkv.shape
    if tokens == 0:
        return
    kv_heads = (heads - num_heads) // 2
    together = math.gcd(num_heads, kv_heads, TOGETHER) if tokens >= MANY else 1
    _norm_rope_store[(triton.cdiv(tokens, TOKENS), heads // together)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, eps, cos, sin, positions, rows,
        rows if slots is None else slots, block_table, kv_layer, tokens, qkv.stride(0), block_table.stride(0),
        *kv_layer.stride()[:3],
        HEADS=num_heads, KV_HEADS=kv_heads, TOGETHER=together, HALF=dim // 2,
        PADDED=triton.next_power_of_2(dim // 2), TOKENS=TOKENS, BLOCK=block_size, NORM=q_norm is not None,
        SLOTS=slots is not None, CODES=CODES[kv_dtype], PROMPTS=prompts, num_warps=WARPS, **NO_FUSION,
        **pdl_options(kv_layer.device),
    )


@triton.jit
def _norm_rope_store(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, cos_ptr, sin_ptr, positions_ptr, rows_ptr, slots_ptr, table_ptr, kv_ptr,
    tokens, row_stride, table_stride, block_stride, kv_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TOGETHER: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr, CODES: tl.constexpr,
    PROMPTS: tl.constexpr, EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * TOGETHER
    real = token < tokens
    stored = real & (first >= HEADS)
    d = tl.arange(0, PADDED)
    inside = real[:, None] & (d < HALF)[None, :]  # [TOKENS, PADDED]
    turns = inside & (first < HEADS + KV_HEADS)
    dtype = qkv_ptr.dtype.element_ty
    low_norm, high_norm = None, None
    if NORM:
        norm_ptr = q_norm_ptr if first < HEADS else k_norm_ptr
        low_norm = tl.load(norm_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        high_norm = tl.load(norm_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    if EARLY:
        gdc_wait()
    # Loads that other loads depend on come first, so that all of them are in flight together.
    position = tl.load(positions_ptr + token, mask=real, other=0)
    request = tl.load(rows_ptr + token, mask=stored, other=0)
    cos = tl.load(cos_ptr + position[:, None] * HALF + d[None, :], mask=turns, other=0.0)
    sin = tl.load(sin_ptr + position[:, None] * HALF + d[None, :], mask=turns, other=0.0)
    if SLOTS:
        request = tl.load(slots_ptr + request, mask=stored, other=0)
    block = tl.load(table_ptr + request.to(tl.int64) * table_stride + position // BLOCK, mask=stored, other=0)
    offset = (position % BLOCK).to(tl.int32)
    blocks = kv_ptr + block.to(tl.int64) * block_stride  # [TOKENS]
    for head in range(first, first + TOGETHER):
        head_ptr = qkv_ptr + token.to(tl.int64)[:, None] * row_stride + head * (2 * HALF) + d[None, :]
        low = tl.load(head_ptr, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(head_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
        if head < HEADS + KV_HEADS:
            if NORM:
                low, high = norm_heads(low, high, low_norm, high_norm, eps, 2 * HALF, TOKENS, PADDED, dtype)
            low, high = rotate(low, high, cos, sin, dtype)
        if head < HEADS:
            tl.store(head_ptr, low.to(dtype), mask=inside)
            tl.store(head_ptr + HALF, high.to(dtype), mask=inside)
        else:
            if CODES > 0:
                largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))  # [TOKENS]
                scale = tl.div_rn(largest, tl.full(largest.shape, 448.0 if CODES == 1 else 127.0, tl.float32))
                low_code = encode(low, scale[:, None] + tl.zeros_like(low), CODES)
                high_code = encode(high, scale[:, None] + tl.zeros_like(high), CODES)
            else:
                low_code = low.to(kv_ptr.dtype.element_ty)
                high_code = high.to(kv_ptr.dtype.element_ty)
            slab = blocks + (head - HEADS) % KV_HEADS * head_stride
            if head >= HEADS + KV_HEADS:
                slab += kv_stride
            if keys_by_token(kv_ptr) or head >= HEADS + KV_HEADS:
                places = slab[:, None] + (offset * (2 * HALF))[:, None] + d[None, :]
                tl.store(places, low_code, mask=inside)
                tl.store(places + HALF, high_code, mask=inside)
            else:
                # Dimensions are a block apart and tokens of a prompt contiguous, so adjacent threads store adjacent
                # tokens. Where not all tokens are contiguous the hint is still safe: addresses have no known alignment,
                # so that nothing is stored as a vector.
                keys = slab[None, :] + (d * BLOCK)[:, None] + offset[None, :]  # [PADDED, TOKENS]
                if PROMPTS:
                    keys = tl.max_contiguous(keys, [1, TOKENS])
                valid = real[None, :] & (d < HALF)[:, None]
                tl.store(keys, tl.trans(low_code), mask=valid)
                tl.store(keys + HALF * BLOCK, tl.trans(high_code), mask=valid)
            if CODES > 0:
                scales = (slab + BLOCK * 2 * HALF).to(tl.pointer_type(tl.float32))
                tl.store(scales + offset, scale, mask=real)


@triton.jit
def norm_heads(low, high, low_norm, high_norm, eps, DIM: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
               dtype: tl.constexpr):
    """Normalise heads given as halves [ROWS, PADDED], float32; the result is rounded to `dtype` and float32 again."""
    squares = pairwise_sum(low * low, ROWS, PADDED) + pairwise_sum(high * high, ROWS, PADDED)
    factor = tl.rsqrt(squares / DIM + eps)[:, None]
    return (scaled(low, factor, low_norm, dtype).to(tl.float32), scaled(high, factor, high_norm, dtype).to(tl.float32))


@triton.jit
def rotate(low, high, cos, sin, dtype: tl.constexpr):
    """Rotate heads given as halves, float32; the result is rounded to `dtype` and float32 again."""
    cos, sin = tl.broadcast_to(cos, low.shape), tl.broadcast_to(sin, low.shape)
    turned = tl.fma(low, cos, -(high * sin))
    high = tl.fma(high, cos, low * sin)
    return turned.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
