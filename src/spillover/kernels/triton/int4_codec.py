"""Quantisation of whole KV blocks to int4 on the device and back, in the layout of `kernels.kv_int4`: one pass.

A program processes one head of one layer of one block, keys or values. Tiles are [tokens, dimensions], both padded to
powers of two; the padding is zeros, which the rotation does not change.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.kv_int4 import SCALE_BYTES, chunk_of
from spillover.kernels.triton.attention.ordered_tile import keys_by_token
from spillover.kernels.triton.codes import CODES, decode, encode
from spillover.kernels.triton.launch import NO_FUSION


def encode_blocks(pool: Tensor, blocks: Tensor, block_size: int, pool_dtype: str = "auto") -> Tensor:
    """Encode `blocks` [n] int64 of pool [num_blocks, layers, 2, Hk, size] -> [n, layers, 2, Hk, bs * (D / 2 + 2)]
    uint8; `pool_dtype`: "fp8" or "int8" where the pool holds codes."""
    _, layers, _, heads, _ = pool.shape
    dim = _head_dim(pool, block_size, pool_dtype)
    codes = torch.empty(len(blocks), layers, 2, heads, block_size * (dim // 2 + SCALE_BYTES), dtype=torch.uint8,
                        device=pool.device)
    _run(_encode, codes, pool, blocks, block_size, pool_dtype)
    return codes


def decode_blocks(codes: Tensor, pool: Tensor, blocks: Tensor, block_size: int, pool_dtype: str = "auto") -> None:
    """Decode codes, as `encode_blocks` returns them, into `blocks` [n] of the pool."""
    _run(_decode, codes, pool, blocks, block_size, pool_dtype)


def _head_dim(pool: Tensor, block_size: int, pool_dtype: str) -> int:
    return pool.shape[-1] // block_size - (0 if pool_dtype == "auto" else 4)  # codes: without the float32 scale


def _run(kernel: Any, codes: Tensor, pool: Tensor, blocks: Tensor, block_size: int, pool_dtype: str) -> None:
    _, layers, _, heads, size = pool.shape
    dim = _head_dim(pool, block_size, pool_dtype)
    scales = pool if pool_dtype == "auto" else pool.view(torch.float32)
    for keys in (True, False):
        if len(blocks):
            kernel[(len(blocks), layers * heads)](
                pool, scales, blocks, codes, codes.view(torch.int16), pool.stride(0), KEYS=keys, HEADS=heads, DIM=dim,
                PADDED=triton.next_power_of_2(dim), STAGES=chunk_of(dim).bit_length() - 1,
                BLOCK=block_size, TOKENS=triton.next_power_of_2(block_size), SIZE=size, CODES=CODES[pool_dtype],
                **NO_FUSION,  # an eight-bit code times its scale is rounded before it is added
            )


@triton.jit
def _encode(
    pool, scales, blocks, codes, steps, block_stride, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
    CODES: tl.constexpr,
):
    inside, start = _head(KEYS, HEADS, DIM, BLOCK)
    source = tl.load(blocks + tl.program_id(0)) * block_stride + inside * SIZE
    places, valid = _places(pool, KEYS, DIM, PADDED, BLOCK, TOKENS)
    x = tl.load(pool + source + places, mask=valid, other=0)
    t, pair = tl.arange(0, TOKENS), tl.arange(0, PADDED // 2)
    if CODES == 0:
        x = x.to(tl.float32)
    else:
        scale = tl.load(scales + (source + BLOCK * DIM) // 4 + t, mask=t < BLOCK, other=0)
        x = decode(x, tl.float32, CODES) * scale[:, None]
    x = _rotate(x, PADDED, STAGES, TOKENS)
    top = tl.max(tl.abs(x), 1)
    # The step is rounded to bfloat16, ties to even, whose bits are the upper half of a float32.
    bits = tl.div_rn(top, tl.full(top.shape, 7.5, tl.float32)).to(tl.int32, bitcast=True)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    step = (tl.zeros_like(x).to(tl.int32, bitcast=True) + (half << 16)[:, None]).to(tl.float32, bitcast=True)
    ratio = tl.where(step > 0, tl.div_rn(x, tl.where(step > 0, step, 1.0)) + 8.0, 0.0)
    code = tl.minimum(tl.maximum(ratio, 0.0), 15.0).to(tl.int32)
    low, high = tl.split(tl.reshape(code, (TOKENS, PADDED // 2, 2)))
    places = pair[None, :] * BLOCK + t[:, None]
    valid = (t < BLOCK)[:, None] & (pair < DIM // 2)[None, :]
    tl.store(codes + start + places, (low | (high << 4)).to(tl.uint8), mask=valid)
    tl.store(steps + (start + BLOCK * (DIM // 2)) // 2 + t, half.to(tl.int16), mask=t < BLOCK)


@triton.jit
def _decode(
    pool, scales, blocks, codes, steps, block_stride, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
    CODES: tl.constexpr,
):
    inside, start = _head(KEYS, HEADS, DIM, BLOCK)
    t, pair = tl.arange(0, TOKENS), tl.arange(0, PADDED // 2)
    valid = (t < BLOCK)[:, None] & (pair < DIM // 2)[None, :]
    both = tl.load(codes + start + pair[None, :] * BLOCK + t[:, None], mask=valid, other=0).to(tl.int32)
    half = tl.load(steps + (start + BLOCK * (DIM // 2)) // 2 + t, mask=t < BLOCK, other=0)
    step = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    x = tl.reshape(tl.join(both & 15, both >> 4), (TOKENS, PADDED)).to(tl.float32) - 7.5
    # DIM is a multiple of the chunk, so the decoded padding stays within the padding.
    x = _rotate(x * step[:, None], PADDED, STAGES, TOKENS) * (1.0 / (1 << STAGES))
    places, valid = _places(pool, KEYS, DIM, PADDED, BLOCK, TOKENS)
    target = tl.load(blocks + tl.program_id(0)) * block_stride + inside * SIZE
    if CODES == 0:
        if pool.dtype.element_ty == tl.float16:  # rounding errors near the maximum must not become infinity
            x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        tl.store(pool + target + places, x.to(pool.dtype.element_ty), mask=valid)
    else:
        x = tl.where(valid, x, 0.0)
        top = tl.max(tl.abs(x), 1)
        scale = tl.div_rn(top, tl.full(top.shape, 448.0 if CODES == 1 else 127.0, tl.float32))
        tl.store(pool + target + places, encode(x, tl.zeros_like(x) + scale[:, None], CODES), mask=valid)
        tl.store(scales + (target + BLOCK * DIM) // 4 + t, scale, mask=t < BLOCK)


@triton.jit
def _rotate(x, PADDED: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr):
    """Rotate x [TOKENS, PADDED] within chunks of 2**STAGES dimensions, not normalised; neighbours are added first."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (TOKENS, PADDED >> (stage + 1), 2, 1 << stage))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        x = tl.reshape(pairs, (TOKENS, PADDED))
    return x


@triton.jit
def _head(KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of this program's head within a block, and the offset of its codes."""
    layer, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    inside = (layer * 2 + (0 if KEYS else 1)) * HEADS + head
    start = (tl.program_id(0).to(tl.int64) * (tl.num_programs(1) * 2) + inside) * (BLOCK * (DIM // 2 + 2))
    return inside, start


@triton.jit
def _places(pool, KEYS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
            TOKENS: tl.constexpr):
    """Return the offsets of a head's numbers [TOKENS, PADDED] in the pool, and a mask of the valid ones."""
    t, d = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    valid = (t < BLOCK)[:, None] & (d < DIM)[None, :]
    if KEYS and not keys_by_token(pool):
        places = t[:, None] + d[None, :] * BLOCK
    else:
        places = t[:, None] * DIM + d[None, :]
    return places, valid
