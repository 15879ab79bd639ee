"""Attention over the paged pool: equal to the reference, blind to masked positions, the same bits in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.attention import attention, attention_reference, store_kv, store_kv_reference
from spillover.kernels.batch import AttentionBatch
from support.kernels.sequences import Sequences, sequences

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def dense(s: Sequences, request: int, window: int | None, sinks: Tensor | None) -> Tensor:
    """Compute attention by its textbook definition, in double precision."""
    q, k, v = (x[request].double() for x in (s.q, s.k, s.v))
    length, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    row, column = torch.arange(length)[:, None], torch.arange(length)
    hidden = (column > row) | (column <= row - (window or length))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, length, 1)), dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)


shapes = st.tuples(
    st.sampled_from([(1, 1), (6, 2), (9, 3), (8, 8), (14, 1), (32, 1)]),
    st.sampled_from([8, 16, 32, 64, 72, 80]),
    st.sampled_from([8, 16, 24, 32]),
)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    shape=shapes,
    window=st.sampled_from([None, 1, 5, 16, 33]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_prompts_and_steps_equal_the_textbook(
    lengths: list[int], shape: tuple[tuple[int, int], int, int], window: int | None, with_sinks: bool, seed: int
) -> None:
    (heads, kv_heads), dim, block_size = shape
    s = sequences(lengths, heads, kv_heads, dim, block_size, seed)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    cuts = [(seed * 7 + 3 * i) % length for i, length in enumerate(lengths)]  # the end of each first chunk
    if first := [(i, 0, cut) for i, cut in enumerate(cuts) if cut]:
        s.run(first, window, sinks)
    out = s.run([(i, cut, length) for i, (cut, length) in enumerate(zip(cuts, lengths, strict=True))], window, sinks)
    wanted = torch.cat([dense(s, i, window, sinks)[cut:] for i, cut in enumerate(cuts)])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-5)


@needs_native
@pytest.mark.parametrize("window", [None, 40])
def test_native_equals_the_reference_on_a_ragged_batch(window: int | None) -> None:
    parts = [(0, 0, 70), (1, 29, 30), (2, 500, 601), (3, 0, 1), (4, 16, 32), (5, 511, 512)]
    s = sequences([last for _, _, last in parts])
    for request, first, _ in parts:
        if first:
            s.run([(request, 0, first)], window)
    batch, q, k, v = s.batch(parts)
    pool = s.pool.clone()
    store_kv(k, v, s.pool[:, 1], batch)
    store_kv_reference(k, v, pool[:, 1], batch)
    assert torch.equal(s.pool.nan_to_num(77), pool.nan_to_num(77))
    sinks = torch.randn(q.shape[1])
    for extra in (None, sinks):
        native_out = attention(q, s.pool[:, 1], batch, 0.2, window, extra)
        wanted = attention_reference(q, s.pool[:, 1], batch, 0.2, window, extra)
        torch.testing.assert_close(native_out, wanted, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_row_has_the_same_bits_however_it_was_computed(block_size: int, window: int | None) -> None:
    lengths = [600, 37, 290]
    sinks = torch.randn(6) if window == 20 else None

    def fresh() -> Sequences:
        return sequences(lengths, block_size=block_size)

    s = fresh()
    whole = [s.run([(i, 0, n)], window, sinks) for i, n in enumerate(lengths)]
    together = fresh().run([(i, 0, n) for i, n in enumerate(lengths)], window, sinks)
    assert torch.equal(together, torch.cat(whole))
    for chunk in (1, 7, 64):
        s = fresh()
        chunks: list[list[Tensor]] = [[] for _ in lengths]
        for start in range(0, max(lengths), chunk):
            parts = [(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if start < n]
            out = s.run(parts, window, sinks)
            pieces = out.split([last - first for _, first, last in parts])
            for (i, _, _), piece in zip(parts, pieces, strict=True):
                chunks[i].append(piece)
        for i in range(len(lengths)):
            assert torch.equal(torch.cat(chunks[i]), whole[i]), f"chunks of {chunk}"


@needs_native
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            s = sequences([1000, 3])
            s.run([(0, 0, 999), (1, 0, 2)])
            results.append(s.run([(0, 999, 1000), (1, 2, 3)]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("window", [8, 50])
def test_blocks_behind_the_window_may_be_given_away(window: int) -> None:
    s = sequences([200])
    s.run([(0, 0, 199)], window)
    kept = s.run([(0, 199, 200)], window)
    s.tables[0, : (199 - window + 1) // s.block_size] = 0  # the dummy block, which holds NaN
    assert torch.equal(s.run([(0, 199, 200)], window), kept)
    assert kept.isfinite().all()


def test_a_sink_takes_its_share() -> None:
    s = sequences([30])
    plain = s.run([(0, 0, 30)])
    nothing = s.run([(0, 0, 30)], sinks=torch.full((6,), -math.inf))
    torch.testing.assert_close(nothing, plain)
    everything = s.run([(0, 0, 30)], sinks=torch.full((6,), 60.0))
    assert everything.abs().max() < 1e-10


def test_wrong_index_types_are_refused() -> None:
    batch, *_ = sequences([5]).batch([(0, 0, 5)])
    with pytest.raises(ValueError, match="int32"):
        AttentionBatch(**{**batch.__dict__, "seq_lens": batch.seq_lens.long()})
    with pytest.raises(ValueError, match="int64"):
        AttentionBatch(**{**batch.__dict__, "positions": batch.positions.int()})


def test_bfloat16_runs_on_the_reference() -> None:
    s = sequences([40])
    wanted = s.run([(0, 0, 40)])
    batch, q, k, v = s.batch([(0, 0, 40)])
    layer = torch.zeros_like(s.pool[:, 1], dtype=torch.bfloat16)
    store_kv(k.bfloat16(), v.bfloat16(), layer, batch)
    out = attention(q.bfloat16(), layer, batch, 1 / math.sqrt(32))
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.05)
