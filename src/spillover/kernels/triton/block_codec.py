"""Quantisation of whole KV blocks on the device and back, in the layout of `kernels.kv_quant`: one pass over the bytes.

A program processes one head of one layer of one block, keys or values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.triton.attention.ordered_tile import keys_by_token
from spillover.kernels.triton.codes import CODES, decode, encode

SCALE_BYTES = 4


def encode_blocks(pool: Tensor, blocks: Tensor, block_size: int, kv_dtype: str) -> Tensor:
    """Encode `blocks` [n] int64 of pool [blocks, layers, 2, Hk, bs * D] -> [n, layers, 2, Hk, bs * (D + 4)] uint8."""
    _, layers, _, heads, size = pool.shape
    codes = torch.empty(len(blocks), layers, 2, heads, size + block_size * SCALE_BYTES, dtype=torch.uint8,
                        device=pool.device)
    _run(_encode, codes, pool, blocks, block_size, kv_dtype)
    return codes


def decode_blocks(codes: Tensor, pool: Tensor, blocks: Tensor, block_size: int, kv_dtype: str) -> None:
    """Decode codes, as `encode_blocks` returns them, into `blocks` [n] of the pool."""
    _run(_decode, codes, pool, blocks, block_size, kv_dtype)


def _run(kernel: Any, codes: Tensor, pool: Tensor, blocks: Tensor, block_size: int, kv_dtype: str) -> None:
    _, layers, _, heads, size = pool.shape
    dim = size // block_size
    for keys in (True, False):
        if len(blocks):
            kernel[(len(blocks), layers * heads)](
                pool, blocks, codes, codes.view(torch.float32), pool.stride(0), KEYS=keys, HEADS=heads, DIM=dim,
                PADDED=triton.next_power_of_2(dim), BLOCK=block_size, TOKENS=triton.next_power_of_2(block_size),
                CODES=CODES[kv_dtype],
            )


@triton.jit
def _encode(
    pool, blocks, codes, scales, block_stride, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CODES: tl.constexpr,
):
    inside, start = _head(KEYS, HEADS, DIM, BLOCK)
    places, valid = _places(KEYS, DIM, PADDED, BLOCK, TOKENS)
    source = pool + tl.load(blocks + tl.program_id(0)) * block_stride + inside * (BLOCK * DIM)
    x = tl.load(source + _pool_places(pool, places, KEYS, DIM, PADDED, BLOCK, TOKENS), mask=valid, other=0)
    x = x.to(tl.float32)
    top = tl.max(tl.abs(x), 0 if KEYS else 1)
    scale = tl.div_rn(top, tl.full(top.shape, 448.0 if CODES == 1 else 127.0, tl.float32))
    wide = tl.zeros_like(x) + (scale[None, :] if KEYS else scale[:, None])
    tl.store(codes + start + places, encode(x, wide, CODES), mask=valid)
    t = tl.arange(0, TOKENS)
    tl.store(scales + (start + BLOCK * DIM) // 4 + t, scale, mask=t < BLOCK)


@triton.jit
def _decode(
    pool, blocks, codes, scales, block_stride, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CODES: tl.constexpr,
):
    inside, start = _head(KEYS, HEADS, DIM, BLOCK)
    places, valid = _places(KEYS, DIM, PADDED, BLOCK, TOKENS)
    t = tl.arange(0, TOKENS)
    scale = tl.load(scales + (start + BLOCK * DIM) // 4 + t, mask=t < BLOCK, other=0)
    x = decode(tl.load(codes + start + places, mask=valid, other=0), tl.float32, CODES)
    x *= scale[None, :] if KEYS else scale[:, None]
    target = pool + tl.load(blocks + tl.program_id(0)) * block_stride + inside * (BLOCK * DIM)
    tl.store(target + _pool_places(pool, places, KEYS, DIM, PADDED, BLOCK, TOKENS), x.to(pool.dtype.element_ty),
             mask=valid)


@triton.jit
def _head(KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of this program's head within a block, and the offset of its codes."""
    layer, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    inside = (layer * 2 + (0 if KEYS else 1)) * HEADS + head
    start = (tl.program_id(0).to(tl.int64) * (tl.num_programs(1) * 2) + inside) * (BLOCK * (DIM + 4))
    return inside, start


@triton.jit
def _places(KEYS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Return the offsets of a head's codes, keys [DIM, BLOCK] and values [BLOCK, DIM], and a mask of the valid ones."""
    d, t = tl.arange(0, PADDED), tl.arange(0, TOKENS)
    if KEYS:
        places, valid = d[:, None] * BLOCK + t[None, :], (d < DIM)[:, None] & (t < BLOCK)[None, :]
    else:
        places, valid = t[:, None] * DIM + d[None, :], (t < BLOCK)[:, None] & (d < DIM)[None, :]
    return places, valid


@triton.jit
def _pool_places(pool, places, KEYS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
                 TOKENS: tl.constexpr):
    """Return the offsets of the same numbers in the pool, whose keys may be stored token by token."""
    if KEYS and keys_by_token(pool):
        places = tl.arange(0, PADDED)[:, None] + tl.arange(0, TOKENS)[None, :] * DIM
    return places
