"""Attention over a quantised pool: what it stores, how accurate it is, and the same bits in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.attention import attention, attention_reference, store_kv, store_kv_reference
from spillover.kernels.kv_quant import decode_blocks
from support.kernels.sequences import sequences

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
kinds = st.sampled_from(["fp8", "int8"])
shapes = st.tuples(
    st.sampled_from([(1, 1), (6, 2), (9, 3), (14, 1)]),
    st.sampled_from([8, 16, 64, 72]),
    st.sampled_from([8, 16, 24, 32]),
)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4), shape=shapes, kind=kinds, seed=st.integers(0, 99),
       window=st.sampled_from([None, 1, 16, 33]), with_sinks=st.booleans())
def test_it_is_attention_over_the_decoded_pool(
    lengths: list[int], shape: tuple[tuple[int, int], int, int], kind: str, seed: int, window: int | None,
    with_sinks: bool,
) -> None:
    """The result equals attention over a full-precision pool with the decoded values, except for rounding."""
    (heads, kv_heads), dim, block_size = shape
    s = sequences(lengths, heads, kv_heads, dim, block_size, seed, kind)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    parts = [(i, 0, n) for i, n in enumerate(lengths)]
    out = s.run(parts, window, sinks)
    plain = sequences(lengths, heads, kv_heads, dim, block_size, seed)
    batch, q, _, _ = plain.batch(parts)
    decoded = decode_blocks(s.pool[:, 1], block_size, kind, torch.float32)
    wanted = attention(q, decoded, batch, 1 / math.sqrt(dim), window, sinks)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=2e-5)
    unquantised = plain.run(parts, window, sinks)
    torch.testing.assert_close(out, unquantised, rtol=0.2, atol=0.3)


@needs_native
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("window", [None, 40])
def test_native_equals_the_reference_on_a_ragged_batch(window: int | None, kind: str) -> None:
    parts = [(0, 0, 70), (1, 29, 30), (2, 500, 601), (3, 0, 1), (4, 16, 32), (5, 511, 512)]
    s = sequences([last for _, _, last in parts], kv_dtype=kind)
    for request, first, _ in parts:
        if first:
            s.run([(request, 0, first)], window)
    batch, q, k, v = s.batch(parts)
    pool = s.pool.clone()
    store_kv(k, v, s.pool[:, 1], batch)
    store_kv_reference(k, v, pool[:, 1], batch)
    assert torch.equal(s.pool, pool)  # all bytes, including those not written
    for sinks in (None, torch.randn(q.shape[1])):
        native_out = attention(q, s.pool[:, 1], batch, 0.2, window, sinks)
        wanted = attention_reference(q, s.pool[:, 1], batch, 0.2, window, sinks)
        torch.testing.assert_close(native_out, wanted, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_row_has_the_same_bits_however_it_was_computed(block_size: int, window: int | None, kind: str) -> None:
    lengths = [600, 37, 290]

    def fresh() -> list[Tensor]:
        s = sequences(lengths, block_size=block_size, kv_dtype=kind)
        return [s.run([(i, 0, n)], window) for i, n in enumerate(lengths)]

    whole = fresh()
    together = sequences(lengths, block_size=block_size, kv_dtype=kind)
    assert torch.equal(together.run([(i, 0, n) for i, n in enumerate(lengths)], window), torch.cat(whole))
    for chunk in (7, 64):
        s = sequences(lengths, block_size=block_size, kv_dtype=kind)
        for start in range(0, max(lengths), chunk):
            parts = [(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if start < n]
            pieces = s.run(parts, window).split([last - first for _, first, last in parts])
            for (i, first, last), piece in zip(parts, pieces, strict=True):
                assert torch.equal(piece, whole[i][first:last]), f"chunks of {chunk}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_run_on_the_reference(dtype: torch.dtype) -> None:
    s = sequences([40], kv_dtype="fp8")
    wanted = s.run([(0, 0, 40)])
    batch, q, k, v = s.batch([(0, 0, 40)])
    layer = torch.zeros_like(s.pool[:, 1])
    store_kv(k.to(dtype), v.to(dtype), layer, batch)
    out = attention(q.to(dtype), layer, batch, 1 / math.sqrt(32))
    assert out.dtype is dtype
    torch.testing.assert_close(out.float(), wanted, rtol=0.1, atol=0.1)


def test_a_pool_of_another_type_is_refused() -> None:
    batch, q, k, v = sequences([5], kv_dtype="int8").batch([(0, 0, 5)])
    plain = sequences([5]).pool[:, 0]
    with pytest.raises(ValueError, match=r"pool of torch.float32 does not hold int8 KV"):
        store_kv(k, v, plain, batch)
    with pytest.raises(ValueError, match=r"pool of torch.float32 does not hold int8 KV"):
        attention(q, plain, batch, 1.0)
