"""Filtering of logits by min_p, top_k and top_p without sorting: the last token kept is found by bisection.

Logits are compared as integers in the same order, and weights are added as integers, so the result is exact: the first
tokens of a row in descending order of logits, equal ones in ascending order of ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.triton.draw import token_weights

CHUNK = 4096


def keep_likely(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return logits [R, V] with the tokens that are filtered out at minus infinity.

    temperature [R] float32 (0: the row is returned unchanged), top_k [R] int64 (0: off), top_p [R] float64, min_p [R]
    float32.
    """
    rows, vocab = logits.shape
    out = torch.empty_like(logits)
    if rows:
        bits = 16 if logits.dtype is torch.bfloat16 else 32  # a bfloat16 is the upper half of a float32
        _keep_likely[(rows,)](logits, out, temperature, top_k, top_p, min_p, logits.stride(0), vocab, BITS=bits,
                              CHUNK=CHUNK, num_warps=8)
    return out


@triton.jit
def _keep_likely(logits_ptr, out_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, stride, vocab,
                 BITS: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    logits_ptr += row * stride
    out_ptr += row * vocab
    index = tl.arange(0, CHUNK)
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, vocab, CHUNK):
        highest = tl.maximum(highest, _load(logits_ptr, start + index, vocab))
    peak = tl.max(highest, 0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    greedy = temperature <= 0
    divisor = tl.where(greedy, 1.0, temperature)
    least = tl.where(greedy | (min_p <= 0), -1.0, min_p)  # lower bound of exp((logit - largest) / temperature)
    top_k = tl.where(greedy | (top_k == 0), vocab, top_k)
    top_p = tl.where(greedy, 1.0, top_p)

    # The key of the k-th largest logit: the largest key with at least k tokens at or above it.
    kth = tl.zeros((), tl.int64)
    if top_k < vocab:
        for bit in range(BITS):
            tried = kth | (tl.full((), 1, tl.int64) << (BITS - 1 - bit))
            count = _measure(logits_ptr, vocab, peak, divisor, least, tried - 1, False, BITS, CHUNK)
            kth = tl.where(count >= top_k, tried, kth)
    above = _measure(logits_ptr, vocab, peak, divisor, least, kth, False, BITS, CHUNK)
    equals = top_k - above  # number of tokens equal to the k-th that are kept, those with the lowest ids
    last, kept = kth, equals
    if top_p < 1:
        weight_above = _measure(logits_ptr, vocab, peak, divisor, least, kth, True, BITS, CHUNK)
        one = _key_weight(kth, peak, divisor, BITS)
        num_equal = _measure(logits_ptr, vocab, peak, divisor, least, kth - 1, False, BITS, CHUNK) - above
        whole = weight_above + one * tl.minimum(equals, num_equal)
        limit = top_p * whole.to(tl.float64)
        # Find the smallest key with less weight than the limit above it.
        low = tl.zeros((), tl.int64)
        high = (tl.full((), 1, tl.int64) << BITS) - 1
        for _ in range(BITS):
            middle = (low + high) // 2
            heavy = _measure(logits_ptr, vocab, peak, divisor, least, middle, True, BITS, CHUNK).to(tl.float64) >= limit
            low = tl.where(heavy, middle + 1, low)
            high = tl.where(heavy, high, middle)
        if low >= kth:
            before = _measure(logits_ptr, vocab, peak, divisor, least, low, True, BITS, CHUNK)
            each = tl.maximum(_key_weight(low, peak, divisor, BITS), 1)
            # One more token with this key is kept while those before it and all above weigh less than the limit.
            room = tl.ceil((limit - before.to(tl.float64)) / each.to(tl.float64)).to(tl.int64)
            kept = tl.where(low == kth, tl.minimum(room, equals), room)
            last = low
    kept = tl.maximum(kept, 1)
    seen = tl.zeros((), tl.int64)
    for start in range(0, vocab, CHUNK):
        logits = _load(logits_ptr, start + index, vocab)
        key = _key(logits, BITS)
        likely = tl.exp((logits - peak) / divisor) >= least
        equal = (key == last) & likely & (start + index < vocab)
        rank = seen + tl.cumsum(equal.to(tl.int64), 0)
        keep = likely & ((key > last) | (equal & (rank <= kept)))
        tl.store(out_ptr + start + index, tl.where(keep, logits, float("-inf")).to(out_ptr.dtype.element_ty),
                 mask=start + index < vocab)
        seen += tl.sum(equal.to(tl.int64), 0)


@triton.jit
def _measure(logits_ptr, vocab, peak, divisor, least, key, WEIGH: tl.constexpr, BITS: tl.constexpr,
             CHUNK: tl.constexpr):
    """Return the number of tokens above a key, or with WEIGH the sum of their weights."""
    index = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, vocab, CHUNK):
        logits = _load(logits_ptr, start + index, vocab)
        counted = (_key(logits, BITS) > key) & (start + index < vocab) & (tl.exp((logits - peak) / divisor) >= least)
        if WEIGH:
            total += tl.where(counted, token_weights(logits, peak, divisor), 0)
        else:
            total += counted.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _load(logits_ptr, token, vocab):
    return tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(logits, BITS: tl.constexpr):
    """Return an integer ordered as the logits are, of as many bits as they are stored in (the upper of a float32)."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # turns minus zero into zero
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
    return key >> (32 - BITS)


@triton.jit
def _key_weight(key, peak, divisor, BITS: tl.constexpr):
    """Return the weight of tokens with this key."""
    FILLED: tl.constexpr = (1 << (32 - BITS)) - 1  # the bits cut off: ones, since negative numbers are inverted
    bits = ((key << (32 - BITS)) | FILLED).to(tl.uint32).to(tl.int32, bitcast=True)
    logit = tl.where(bits < 0, bits & (2147483647 - FILLED), ~bits).to(tl.float32, bitcast=True)
    return token_weights(logit, peak, divisor)
