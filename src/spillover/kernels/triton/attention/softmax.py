"""The softmax of a row over its keys, summed in the same order by every kernel.

Keys are processed in tiles that begin at multiples of TILE. Tiles form pieces, whose bounds are fixed positions and
never depend on a length: each piece is summed from zero, and pieces are added in order. So a row has the same bits
alone and in a batch, as the one new token of its sequence and in any chunk of its prompt, and whether one program
computes all pieces or each has its own. The weights of a tile are added as integers, whose sum does not depend on the
order; products on tensor cores depend only on the order of their inner dimension; all other rounding is explicit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spillover.kernels.triton.codes import decode

LOG2E = tl.constexpr(1.4426950408889634)
# Weights between 0 and 1 are added as integers, 2**22 for a weight of 1: a weight times 2**24, plus 2**25, where
# float32 has steps of 4, holds that integer in its low bits. The bits above them cancel in a sum of 64.
_WHOLE = tl.constexpr(2.0**24)
_ROUNDER = tl.constexpr(2.0**25)
_PART = tl.constexpr(2.0**-22)
_SUM_BITS = tl.constexpr(0x3FFFFFFF)
# Codes are multiplied as float16, which represents all of them exactly. Weights times the scales of values are raised
# by this factor, which allows values up to 32,000 and keeps those of 0.01 distinct from zero.
_RAISED = tl.constexpr(2.0**8)
_LARGEST = tl.constexpr(65504.0)  # largest finite float16


@triton.jit
def piece_begins(start, WINDOW_PIECE: tl.constexpr):
    """Return whether a piece begins at position `start`, as in ordered_splits.bounds; WINDOW_PIECE: positions per piece
    where rows see a window, otherwise 0."""
    if WINDOW_PIECE > 0:
        return start % WINDOW_PIECE == 0
    # From 4,096 on, where 16 pieces double the position, pieces begin at numbers of five significant bits.
    below = tl.where(start < 1024, start & 127, start & 255)
    return tl.where(start < 4096, below, tl.cast(start, tl.float32).to(tl.int32, bitcast=True) & 0x7FFFF) == 0


@triton.jit
def operand(q, CODES: tl.constexpr):
    """Return queries in the type they are multiplied in: float16 if keys are codes, unless they are float32."""
    if (CODES > 0) and (q.dtype != tl.float32):
        q = tl.clamp(q.to(tl.float32), -_LARGEST, _LARGEST).to(tl.float16)
    return q


@triton.jit
def accumulate_tile(q, k, v, visible, key_scales, value_scales, factor, begins, highest, weight, acc, piece_highest,
                    piece_weight, piece_acc, MASKED: tl.constexpr, CODES: tl.constexpr):
    """Add keys k [D, TILE] and values v [TILE, D] to the sums of a piece: the largest score and the sum of weights
    [ROWS], the weighted values [ROWS, D]; where a piece `begins`, first add the previous piece to the total sums.

    With MASKED, rows see only the keys that `visible` [ROWS, TILE] marks; with CODES, k and v are multiplied by their
    scales [TILE]. `factor` multiplies the scores; it includes log2(e), since the softmax uses powers of two.
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
        # Done only here so that the product of the previous tile and that of the scores are waited for together.
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
    """Return the sums of weights [ROWS, TILE] over the tile, added as integers."""
    whole = tl.fma(p, tl.zeros_like(p) + _WHOLE, tl.zeros_like(p) + _ROUNDER).to(tl.int32, bitcast=True)
    return (tl.sum(whole, 1) & _SUM_BITS).to(tl.float32) * _PART


@triton.jit
def add_piece(highest, weight, acc, piece_highest, piece_weight, piece_acc):
    """Add the sums of a piece to the total so far. The sums of a piece without visible keys are minus infinity and
    zeros, and change nothing."""
    higher = tl.maximum(highest, piece_highest)
    base = _base(higher)
    factor, piece_factor = tl.exp2(highest - base), tl.exp2(piece_highest - base)
    weight = tl.fma(weight, factor, piece_weight * piece_factor)
    acc = tl.fma(acc, factor[:, None] + tl.zeros_like(acc), piece_acc * piece_factor[:, None])
    return higher, weight, acc


@triton.jit
def finish(highest, weight, acc, sink, SINKS: tl.constexpr, CODES: tl.constexpr):
    """Return the softmax's result [ROWS, D]; `sink`: one more score per row, without a value."""
    if SINKS:
        sink = sink.to(tl.float32)
        higher = tl.maximum(highest, sink * LOG2E)
        factor = tl.exp2(highest - higher)
        weight = tl.fma(weight, factor, tl.exp2(tl.fma(sink, tl.zeros_like(sink) + LOG2E, -higher)))
        acc = acc * factor[:, None]
    # Adding zero turns minus zero into zero: the sign of a zero sum depends on what else was added.
    one = tl.full(weight.shape, 1.0 / _RAISED if CODES > 0 else 1.0, tl.float32)
    return acc * tl.div_rn(one, weight)[:, None] + 0.0


@triton.jit
def _base(highest):
    """Return the value subtracted from scores: the largest, or 0 for a row that has seen no key yet."""
    return tl.where(highest == float("-inf"), 0.0, highest)
