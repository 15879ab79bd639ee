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

from spillover.kernels.triton.codes import decode

LOG2E = tl.constexpr(1.4426950408889634)
# Weights between 0 and 1 are added as whole numbers, 2**22 for one: added to 2**25, whose fraction has steps of 4, a
# weight times 2**24 leaves it in the low bits of a float32. What is above them cancels in a sum of 64.
_WHOLE = tl.constexpr(2.0**24)
_ROUNDER = tl.constexpr(2.0**25)
_PART = tl.constexpr(2.0**-22)
_SUM_BITS = tl.constexpr(0x3FFFFFFF)
# Codes are multiplied as float16, in which all of them are exact. Weights times the scales of values are that much
# larger there, which leaves room for values up to 32,000 and keeps those of 0.01 apart from zero.
_RAISED = tl.constexpr(2.0**8)
_LARGEST = tl.constexpr(65504.0)  # float16


@triton.jit
def piece_begins(start, WINDOW_PIECE: tl.constexpr):
    """Return whether a piece begins at position `start`, as ordered_splits.bounds has them; WINDOW_PIECE: positions of
    a piece where rows see a window, else 0."""
    if WINDOW_PIECE > 0:
        return start % WINDOW_PIECE == 0
    # From 4,096 on, where 16 pieces double the position, they begin at numbers of five significant bits.
    below = tl.where(start < 1024, start & 127, start & 255)
    return tl.where(start < 4096, below, tl.cast(start, tl.float32).to(tl.int32, bitcast=True) & 0x7FFFF) == 0


@triton.jit
def operand(q, CODES: tl.constexpr):
    """Return queries as they are multiplied: as float16 with codes, unless they are float32."""
    if (CODES > 0) and (q.dtype != tl.float32):
        q = tl.clamp(q.to(tl.float32), -_LARGEST, _LARGEST).to(tl.float16)
    return q


@triton.jit
def take_tile(q, k, v, visible, key_scales, value_scales, factor, begins, highest, weight, acc, piece_highest,
              piece_weight, piece_acc, MASKED: tl.constexpr, CODES: tl.constexpr):
    """Take keys k [D, TILE] and values v [TILE, D] into the sums of a piece: the largest score and the sum of weights
    [ROWS], the weighted values [ROWS, D]; where a piece `begins`, first add the one before to the sums of the whole.

    With MASKED, rows see what `visible` [ROWS, TILE] says; with CODES, k and v are to be multiplied by their scales
    [TILE]. `factor`: of scores, the softmax being one of powers of two.
    """
    if CODES > 0:
        k = decode(k, q.dtype, CODES)
    scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, TILE]
    if CODES > 0:
        scores *= key_scales[None, :]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1) * factor
    if begins:
        # Only now, as the product of the tile before is waited for together with the scores'.
        highest, weight, acc = add_piece(highest, weight, acc, piece_highest, piece_weight, piece_acc)
        higher = top
        base = _base(higher) if MASKED else higher
        shrink = tl.zeros_like(top)
    else:
        higher = tl.maximum(piece_highest, top)
        base = _base(higher) if MASKED else higher
        shrink = tl.exp2(piece_highest - base)
    p = tl.exp2(tl.fma(scores, factor + tl.zeros_like(scores), -base[:, None] + tl.zeros_like(scores)))
    piece_weight = tl.fma(piece_weight, shrink, _total(p))
    if CODES > 0:
        p *= (value_scales * _RAISED)[None, :]
        v = decode(v, q.dtype, CODES)
    piece_acc = tl.dot(p.to(q.dtype), v, piece_acc * shrink[:, None], input_precision="ieee")
    return highest, weight, acc, higher, piece_weight, piece_acc


@triton.jit
def _total(p):
    """Return the sums of weights [ROWS, TILE] over the tile, added as whole numbers."""
    whole = tl.fma(p, tl.zeros_like(p) + _WHOLE, tl.zeros_like(p) + _ROUNDER).to(tl.int32, bitcast=True)
    return (tl.sum(whole, 1) & _SUM_BITS).to(tl.float32) * _PART


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
def finish(highest, weight, acc, sink, SINKS: tl.constexpr, CODES: tl.constexpr):
    """Return the softmax's result [ROWS, D]; `sink`: of each row, one more score, without a value."""
    if SINKS:
        sink = sink.to(tl.float32)
        higher = tl.maximum(highest, sink * LOG2E)
        mine = tl.exp2(highest - higher)
        weight = tl.fma(weight, mine, tl.exp2(tl.fma(sink, tl.zeros_like(sink) + LOG2E, -higher)))
        acc = acc * mine[:, None]
    # Adding nothing turns minus zero into zero: which of them a sum of nothing is depends on what else was added.
    one = tl.full(weight.shape, 1.0 / _RAISED if CODES > 0 else 1.0, tl.float32)
    return acc * tl.div_rn(one, weight)[:, None] + 0.0


@triton.jit
def _base(highest):
    """Return what scores are taken relative to; a row that has seen no key yet has no largest one."""
    return tl.where(highest == float("-inf"), 0.0, highest)
