"""The softmax of a row over its keys, in one order of sums whichever kernel computes it.

Keys are taken in tiles that begin at multiples of TILE. Tiles form pieces, whose bounds are positions and never depend
on a length: a piece is summed up from nothing, and pieces are added in their order. So a row has the same bits alone
and in a batch, as the one new token of its sequence and in any chunk of its prompt, and whether one program takes all
pieces or each has its own. The weights of a tile are added as whole numbers, whose sum has no order; products on tensor
cores depend on the order of their inner dimension alone; every other rounding is written out.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The whole numbers that weights between 0 and 1 are added as. Adding 2**23 leaves one in the low bits of a float32.
_WHOLE = tl.constexpr(4194304.0)  # 2**22
_PART = tl.constexpr(2.0**-22)
_ROUNDER = tl.constexpr(8388608.0)  # 2**23
_LOW_BITS = tl.constexpr(0x7FFFFF)


@triton.jit
def piece_ends(start, TILE: tl.constexpr, WINDOW_PIECE: tl.constexpr):
    """Return whether the tile that begins at position `start` is the last of a piece, as ordered_splits.bounds has
    them; WINDOW_PIECE: positions of a piece where rows see a window, else 0."""
    if WINDOW_PIECE > 0:
        size = WINDOW_PIECE
    else:
        size = tl.where(start < 1024, 128, 256)
        for octave in tl.static_range(10):
            size = tl.where(start >= (8192 << octave), 512 << octave, size)
    return (start + TILE) % size == 0


@triton.jit
def take_tile(q, k, v, visible, key_scales, value_scales, factor, highest, weight, acc, MASKED: tl.constexpr,
              CODES: tl.constexpr):
    """Take keys k [D, TILE] and values v [TILE, D] into the sums of a piece: the largest score and the sum of weights
    [ROWS], the weighted values [ROWS, D].

    With MASKED, rows see what `visible` [ROWS, TILE] says; with CODES, k and v are to be multiplied by their scales
    [TILE]. `factor`: of scores, the softmax being one of powers of two.
    """
    scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, TILE]
    if CODES > 0:
        scores *= key_scales[None, :]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * factor)
    base = _base(higher) if MASKED else higher
    shrink = tl.exp2(highest - base)
    p = tl.exp2(tl.fma(scores, factor + tl.zeros_like(scores), -base[:, None] + tl.zeros_like(scores)))
    whole = tl.fma(p, tl.zeros_like(p) + _WHOLE, tl.zeros_like(p) + _ROUNDER).to(tl.int32, bitcast=True) & _LOW_BITS
    weight = tl.fma(weight, shrink, tl.sum(whole, 1).to(tl.float32) * _PART)
    if CODES > 0:
        p *= value_scales[None, :]
    acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, weight, acc


@triton.jit
def add_piece(highest, weight, acc, piece_highest, piece_weight, piece_acc):
    """Add the sums of a piece to those so far. Where no key was seen they are minus infinity and zeros, and change
    nothing."""
    higher = tl.maximum(highest, piece_highest)
    base = _base(higher)
    mine, theirs = tl.exp2(highest - base), tl.exp2(piece_highest - base)
    weight = tl.fma(weight, mine, piece_weight * theirs)
    acc = tl.fma(acc, mine[:, None] + tl.zeros_like(acc), piece_acc * theirs[:, None])
    return higher, weight, acc


@triton.jit
def finish(highest, weight, acc, sink, SINKS: tl.constexpr):
    """Return the softmax's result [ROWS, D]; `sink`: of each row, one more score, without a value."""
    if SINKS:
        sink = sink.to(tl.float32) * LOG2E
        higher = tl.maximum(highest, sink)
        mine = tl.exp2(highest - higher)
        weight = tl.fma(weight, mine, tl.exp2(sink - higher))
        acc = acc * mine[:, None]
    # Adding nothing turns minus zero into zero: which of them a sum of nothing is depends on what else was added.
    return tl.div_rn(acc, weight[:, None] + tl.zeros_like(acc)) + 0.0


@triton.jit
def _base(highest):
    """Return what scores are taken relative to; a row that has seen no key yet has no largest one."""
    return tl.where(highest == float("-inf"), 0.0, highest)
