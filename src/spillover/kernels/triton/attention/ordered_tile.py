"""Loads a tile of keys and values from the blocks of a paged pool, for the kernels in the order of `softmax.py`.

Which blocks they are is asked for one tile ahead: loads that wait for other loads would run less far ahead. Positions
`oldest` .. `end` are a sequence's own. Keys elsewhere are read too, but get no score; values elsewhere are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_by_token(pool):
    """Return whether keys of a block lie token by token in a pool, as values do: where kernels.attention has it so."""
    return pool.dtype.element_ty.primitive_bitwidth == 16


@triton.jit
def tile_blocks(table, start, oldest, end, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the blocks of the tile from position `start` on, a tuple of TILE / BLOCK, at least one; WINDOW: whether
    there may be none before that of `oldest`."""
    blocks = ()
    for index in tl.static_range((TILE + BLOCK - 1) // BLOCK):
        place = tl.minimum(start // BLOCK + index, (end - 1) // BLOCK)
        if WINDOW > 0:
            place = tl.maximum(place, oldest // BLOCK)
        blocks = blocks + (tl.load(table + place),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def load_tile(slab, blocks, start, own, block_stride, kv_stride, d, DIM: tl.constexpr, PADDED: tl.constexpr,
              BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load keys [PADDED, TILE] and values [TILE, PADDED] of the tile from position `start` on; `slab`: the keys of one
    head, values `kv_stride` behind them; `own`: with MASKED, which positions are the sequence's."""
    block, inside = _places(blocks, start, block_stride, BLOCK, TILE)
    values = slab + (block + kv_stride + inside * DIM)[:, None] + d[None, :]
    if keys_by_token(slab):
        keys = slab + (block + inside * DIM)[:, None] + d[None, :]
        k = tl.trans(tl.load(keys) if DIM == PADDED else tl.load(keys, mask=d[None, :] < DIM, other=0))
    else:
        # Keys of a block lie side by side: this is how far, for the compiler to load them as vectors.
        RUN: tl.constexpr = BLOCK if BLOCK < TILE else TILE
        places = tl.max_contiguous(tl.multiple_of((block + inside)[None, :] + d[:, None] * BLOCK, [1, RUN]), [1, RUN])
        k = tl.load(slab + places) if DIM == PADDED else tl.load(slab + places, mask=d[:, None] < DIM, other=0)
    if DIM == PADDED:
        v = tl.load(values, mask=own[:, None], other=0) if MASKED else tl.load(values)
    else:
        v = tl.load(values, mask=own[:, None] & (d[None, :] < DIM) if MASKED else d[None, :] < DIM, other=0)
    return k, v


@triton.jit
def load_scales(slab, blocks, start, own, block_stride, kv_stride, DIM: tl.constexpr, BLOCK: tl.constexpr,
                TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales [TILE] of a tile's keys and of its values, float32: they lie behind the codes of a block."""
    block, inside = _places(blocks, start, block_stride // 4, BLOCK, TILE)
    keys = (slab + BLOCK * DIM).to(tl.pointer_type(tl.float32)) + block + inside
    values = tl.load(keys + kv_stride // 4)
    return tl.load(keys), tl.where(own, values, 0.0) if MASKED else values


@triton.jit
def _places(blocks, start, block_stride, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return where the block of each position of a tile begins, int64 [TILE], and its place inside of it."""
    index = tl.arange(0, TILE)
    block = blocks[0] + tl.zeros_like(index)
    for other in tl.static_range(1, (TILE + BLOCK - 1) // BLOCK):
        block = tl.where(index // BLOCK == other, blocks[other], block)
    inside = index % BLOCK if BLOCK <= TILE else start % BLOCK + index
    # Neither is negative: without signs this is one instruction.
    places = block.to(tl.uint32).to(tl.uint64) * tl.cast(block_stride, tl.uint32).to(tl.uint64)
    return places.to(tl.int64), inside
