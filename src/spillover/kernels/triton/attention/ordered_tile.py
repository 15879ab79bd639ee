"""Loading of a tile of keys and values from the blocks of a paged pool, for the kernels in the order of `softmax.py`.

The block numbers are loaded one tile ahead: loads that depend on other loads could not be prefetched as far. Positions
`oldest` .. `end` belong to the sequence. Keys outside are read too, but get no score; values outside are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_by_token(pool):
    """Return whether a pool stores the keys of a block token by token, as it does values (see kernels.attention)."""
    return pool.dtype.element_ty.primitive_bitwidth == 16


@triton.jit
def tile_blocks(table, start, oldest, end, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the blocks of the tile from position `start` on, a tuple of TILE / BLOCK, at least one; WINDOW: whether
    blocks before that of `oldest` may not exist."""
    blocks = ()
    for index in tl.static_range((TILE + BLOCK - 1) // BLOCK):
        place = tl.minimum(start // BLOCK + index, (end - 1) // BLOCK)
        if WINDOW > 0:
            place = tl.maximum(place, oldest // BLOCK)
        blocks = blocks + (tl.load(table + place),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def load_tile(slab, blocks, start, valid, block_stride, kv_stride, d, DIM: tl.constexpr, PADDED: tl.constexpr,
              BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load keys [PADDED, TILE] and values [TILE, PADDED] of the tile from position `start` on; `slab`: the keys of one
    head, with its values `kv_stride` after them; `valid`: with MASKED, the positions that belong to the sequence."""
    block, inside = _places(blocks, start, block_stride, BLOCK, TILE)
    values = slab + (block + kv_stride + inside * DIM)[:, None] + d[None, :]
    if keys_by_token(slab):
        keys = slab + (block + inside * DIM)[:, None] + d[None, :]
        k = tl.trans(tl.load(keys) if DIM == PADDED else tl.load(keys, mask=d[None, :] < DIM, other=0))
    else:
        # Number of keys of a block that are contiguous, so that the compiler can load them as vectors.
        RUN: tl.constexpr = BLOCK if BLOCK < TILE else TILE
        places = tl.max_contiguous(tl.multiple_of((block + inside)[None, :] + d[:, None] * BLOCK, [1, RUN]), [1, RUN])
        k = tl.load(slab + places) if DIM == PADDED else tl.load(slab + places, mask=d[:, None] < DIM, other=0)
    if DIM == PADDED:
        v = tl.load(values, mask=valid[:, None], other=0) if MASKED else tl.load(values)
    else:
        v = tl.load(values, mask=valid[:, None] & (d[None, :] < DIM) if MASKED else d[None, :] < DIM, other=0)
    return k, v


@triton.jit
def load_scales(slab, blocks, start, valid, block_stride, kv_stride, DIM: tl.constexpr, BLOCK: tl.constexpr,
                TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales [TILE] of a tile's keys and of its values, float32, stored after the codes of a block."""
    block, inside = _places(blocks, start, block_stride // 4, BLOCK, TILE)
    keys = (slab + BLOCK * DIM).to(tl.pointer_type(tl.float32)) + block + inside
    values = tl.load(keys + kv_stride // 4)
    return tl.load(keys), tl.where(valid, values, 0.0) if MASKED else values


@triton.jit
def _places(blocks, start, block_stride, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the offset of each position's block, int64 [TILE], and the position's index within its block."""
    index = tl.arange(0, TILE)
    block = blocks[0] + tl.zeros_like(index)
    for other in tl.static_range(1, (TILE + BLOCK - 1) // BLOCK):
        block = tl.where(index // BLOCK == other, blocks[other], block)
    inside = index % BLOCK if BLOCK <= TILE else start % BLOCK + index
    # Neither factor is negative, and an unsigned multiplication is one instruction.
    places = block.to(tl.uint32).to(tl.uint64) * tl.cast(block_stride, tl.uint32).to(tl.uint64)
    return places.to(tl.int64), inside
