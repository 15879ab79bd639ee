"""Loads a tile of keys and values from the blocks of a paged pool, for the kernels in the order of `softmax.py`.

Which blocks they are is asked for one tile ahead: loads that wait for other loads would run less far ahead. Nothing is
read from outside of the positions `oldest` .. `end` but keys, which get no score: values there are those of a position
inside, which a weight of 0 makes 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spillover.kernels.triton.codes import decode


@triton.jit
def tile_blocks(table, start, oldest, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the blocks of the tile from position `start` on, a tuple of TILE / BLOCK, at least one."""
    blocks = ()
    for index in tl.static_range((TILE + BLOCK - 1) // BLOCK):
        place = tl.minimum(tl.maximum(start // BLOCK + index, oldest // BLOCK), (end - 1) // BLOCK)
        blocks = blocks + (tl.load(table + place),)  # noqa: RUF005
    return blocks


@triton.jit
def load_tile(slab, blocks, start, oldest, end, block_stride, kv_stride, d, dtype: tl.constexpr, DIM: tl.constexpr,
              PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, CODES: tl.constexpr):
    """Load keys [PADDED, TILE] and values [TILE, PADDED] of the tile from position `start` on; `slab`: the keys of one
    head, values `kv_stride` behind them."""
    # Keys of a block lie side by side: this is how far, for the compiler to load them as vectors.
    RUN: tl.constexpr = BLOCK if BLOCK < TILE else TILE
    n = start + tl.arange(0, TILE)
    block = _block(blocks, BLOCK, TILE) * block_stride  # [TILE]
    places = tl.max_contiguous(tl.multiple_of((block + n % BLOCK)[None, :] + d[:, None] * BLOCK, [1, RUN]), [1, RUN])
    inside = tl.minimum(tl.maximum(n, oldest), end - 1)
    values = block + kv_stride + (inside % BLOCK) * DIM
    if DIM == PADDED:
        k = tl.load(slab + places)
        v = tl.load(slab + values[:, None] + d[None, :])
    else:
        k = tl.load(slab + places, mask=d[:, None] < DIM, other=0)
        v = tl.load(slab + values[:, None] + d[None, :], mask=d[None, :] < DIM, other=0)
    if CODES > 0:
        k = decode(k, dtype, CODES)
        v = decode(v, dtype, CODES)
    return k, v


@triton.jit
def load_scales(slab, blocks, start, oldest, end, block_stride, kv_stride, DIM: tl.constexpr, BLOCK: tl.constexpr,
                TILE: tl.constexpr):
    """Load the scales [TILE] of a tile's keys and of its values, float32: they lie behind the codes of a block."""
    n = tl.minimum(tl.maximum(start + tl.arange(0, TILE), oldest), end - 1)
    keys = (slab + BLOCK * DIM).to(tl.pointer_type(tl.float32)) \
        + _block(blocks, BLOCK, TILE) * (block_stride // 4) + n % BLOCK
    return tl.load(keys), tl.load(keys + kv_stride // 4)


@triton.jit
def _block(blocks, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the block of each position of a tile, int64 [TILE]."""
    index = tl.arange(0, TILE) // BLOCK
    block = blocks[0] + tl.zeros_like(index)
    for other in tl.static_range(1, (TILE + BLOCK - 1) // BLOCK):
        block = tl.where(index == other, blocks[other], block)
    return block.to(tl.int64)
