"""Sampling of one token per row: the one with the largest logit, or a random one by its probability, in two reads.

Probabilities are added as integers, as in the engine's sampler, so a row's token depends only on that row's logits,
temperature and random number, however the work is split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.launch import pdl_options

CHUNK = 4096
_WEIGHT_SCALE = tl.constexpr(1099511627776.0)  # 2**40: the weight of the likeliest token


def draw(logits: Tensor, temperature: Tensor, uniform: Tensor, out: Tensor, host: Tensor | None = None,
         turn: Tensor | None = None) -> None:
    """Sample from logits [R, V], temperature [R] float32 (0: the first maximum), uniform [R] float64 -> out [R].

    `host` [N, R or more], in pinned memory: the tokens are also written to its row `turn` [1] int32.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    if rows == 0:
        return
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    padded = triton.next_power_of_2(chunks)
    stride = logits.stride(0)
    options = pdl_options(logits.device)
    _peaks[(rows, chunks)](logits, peaks, places, stride, vocab, CHUNK=CHUNK, num_warps=4, **options)
    _sums[(rows, chunks)](logits, peaks, temperature, sums, stride, vocab, chunks, CHUNK=CHUNK, CHUNKS=padded,
                          num_warps=4, **options)
    _pick[(rows,)](logits, peaks, places, temperature, uniform, sums, out, host, turn,
                   None if host is None else host.stride(0), stride, vocab, chunks, CHUNK=CHUNK, CHUNKS=padded,
                   num_warps=8, **options)


@triton.jit
def _peaks(logits_ptr, peaks_ptr, places_ptr, stride, vocab, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    peak, place = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + at, peak)
    tl.store(places_ptr + at, chunk * CHUNK + place)


@triton.jit
def _weights(logits_ptr, highest, temperature, row, chunk, stride, vocab, CHUNK: tl.constexpr):
    """Return a chunk's probabilities up to a common factor, as integers."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return token_weights(logits, highest, temperature)


@triton.jit
def token_weights(logits, highest, temperature):
    return (tl.exp((logits - highest) / temperature) * _WEIGHT_SCALE).to(tl.int64)


@triton.jit
def _sums(logits_ptr, peaks_ptr, temperature_ptr, sums_ptr, stride, vocab, chunks, CHUNK: tl.constexpr,
          CHUNKS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        index = tl.arange(0, CHUNKS)
        highest = tl.max(tl.load(peaks_ptr + row * chunks + index, mask=index < chunks, other=float("-inf")), 0)
        weights = _weights(logits_ptr, highest, temperature, row, chunk, stride, vocab, CHUNK)
        tl.store(sums_ptr + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit
def _pick(logits_ptr, peaks_ptr, places_ptr, temperature_ptr, uniform_ptr, sums_ptr, out_ptr, host_ptr, turn_ptr,
          host_stride, stride, vocab, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    index = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + index, mask=index < chunks, other=float("-inf"))
    highest, first = tl.max(peaks, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(places_ptr + row * chunks + first)
    if temperature > 0:
        sums = tl.load(sums_ptr + row * chunks + index, mask=index < chunks, other=0)
        cumulative = tl.cumsum(sums, 0)
        total = tl.sum(sums, 0)
        # The minimum is needed because the product may round up to the total.
        target = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
        chunk = tl.sum((cumulative <= target).to(tl.int32), 0)
        chunk = tl.minimum(chunk, chunks - 1)  # only NaN logits give a chunk past the last
        before = tl.sum(tl.where(index < chunk, sums, 0), 0)
        weights = _weights(logits_ptr, highest, temperature, row, chunk, stride, vocab, CHUNK)
        within = before + tl.cumsum(weights, 0)
        token = chunk * CHUNK + tl.sum((within <= target).to(tl.int32), 0)
        token = tl.minimum(token, vocab - 1)
    tl.store(out_ptr + row, token.to(tl.int64))
    if host_ptr is not None:
        tl.store(host_ptr + tl.load(turn_ptr).to(tl.int64) * host_stride + row, token.to(tl.int64))
