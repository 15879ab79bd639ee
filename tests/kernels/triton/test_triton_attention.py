"""Paged attention on the device computes what the plain one does, and a request's bits do not depend on its batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from spillover.kernels.attention import store_kv_reference
from spillover.kernels.batch import DecodeScratch, DeviceWork
from spillover.kernels.norm import rms_norm_reference
from spillover.kernels.rope import rope_reference
from spillover.kernels.triton.attention import attention_splits as splits
from spillover.kernels.triton.rope_store import norm_rope_store
from support.paged_attention import DEVICE, DTYPES, TOLERANCE, Case, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [
    (4, 2, 64, 16), (8, 1, 128, 32), (5, 1, 24, 8), (4, 4, 64, 128), (2, 2, 32, 256),
])
def test_a_mixed_batch(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = Case([1, 7, 1, 1, 130], [300, 0, 0, 63, 17], heads, kv_heads, dim, block_size, dtype)
    assert error(case.found(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [1, 9, 64, 100])
def test_a_sliding_window_with_sinks(window: int) -> None:
    case = Case([1, 1, 5, 140], [300, 2, 70, 0], 8, 2, 64, window=window)
    assert error(case.found(sinks=True), case.expected(sinks=True)) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_pool_of_codes(kv_dtype: str) -> None:
    case = Case([1, 3, 1, 40], [270, 5, 0, 20], 4, 2, 64, dtype=torch.float32, kv_dtype=kv_dtype)
    assert error(case.found(), case.expected()) < 1e-5


def test_long_sequences_are_cut_into_larger_pieces() -> None:
    longest = splits.PIECE * splits.MOST_PIECES + 300
    items = splits.decode_splits(np.array([0]), np.array([0]), np.array([longest]), 1, None)
    assert 1 < len(items) <= splits.MOST_PIECES
    case = Case([1, 1], [longest, 500], 2, 1, 16, 64)
    assert error(case.found(), case.expected()) < 1e-5


def test_a_request_has_the_same_bits_alone_and_among_others() -> None:
    case = Case([1, 1, 1, 200], [600, 64, 255, 40], 4, 2, 64)
    together = case.found()
    for request in range(4):
        first, last = (int(case.batch.query_start[request + end]) for end in range(2))
        assert torch.equal(case.attend(*case.part(request, 0, last - first)), together[first:last])


def test_a_prompt_has_the_same_bits_whatever_its_chunks() -> None:
    whole = Case([300], [0], 4, 2, 32)
    expected = whole.found()
    for first, last in ((0, 130), (130, 132), (132, 300)):
        assert torch.equal(whole.attend(*whole.part(0, first, last)), expected[first:last])


@pytest.mark.parametrize("busy", [1, 10**9])
def test_tables_by_slot_padding_and_a_reused_scratch(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine calls it: more room for items than there are, tables in another order, twice over; and the same
    bits whether one program takes a sequence or many share it."""
    case = Case([1, 1, 1], [600, 3, 300], 4, 2, 64)
    expected = case.found()
    assert error(expected, case.expected()) < 1e-5
    monkeypatch.setattr(splits, "BUSY", busy)
    lengths = case.batch.seq_lens.cpu().numpy().astype(np.int64)
    slots = np.array([5, 0, 2])
    items = splits.decode_splits(np.arange(3), slots, lengths, 2, None)
    assert len(items) == (3 if busy == 1 else 5 + 1 + 3)
    room = splits.max_splits(3, 1024)
    padded = np.concatenate((items, np.full((room - len(items), splits.FIELDS), 12345, dtype=np.int32)))
    tables = torch.zeros(6, case.batch.block_table.shape[1], dtype=torch.int32, device=DEVICE)
    tables[torch.from_numpy(slots).to(DEVICE)] = case.batch.block_table
    scratch = DecodeScratch.make(room, 6, 4, 2, 64, torch.device(DEVICE))
    work = DeviceWork(torch.from_numpy(padded).to(DEVICE), torch.tensor([len(items)], dtype=torch.int32, device=DEVICE),
                      None, torch.from_numpy(slots).int().to(DEVICE), scratch)
    batch = replace(case.batch, block_table=tables, work=work)
    for _ in range(2):
        assert torch.equal(case.attend(case.q, batch), expected)
    assert not scratch.finished.any()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope_and_store_in_one(kv_dtype: str, normed: bool) -> None:
    heads, kv_heads, dim = 6, 2, 24
    case = Case([1, 20, 3], [33, 0, 15], heads, kv_heads, dim, 8, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = case.q.shape[0]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE)
    qkv[3, heads] = 0  # a key of zeros has no scale
    weights = [torch.rand(dim, generator=generator).to(DEVICE) + 0.5 for _ in range(2)]
    cos, sin = (torch.randn(64, dim // 2, generator=generator).to(DEVICE) for _ in range(2))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = rms_norm_reference(q, weights[0], 1e-6), rms_norm_reference(k, weights[1], 1e-6)
    q, k = rope_reference(q, k, cos, sin, case.batch.positions)
    expected = case.kv.clone()
    store_kv_reference(k, v, expected, case.batch)
    found = case.kv.clone()
    norm_rope_store(qkv, weights[0] if normed else None, weights[1] if normed else None, 1e-6, cos, sin,
                    case.batch.positions, case.batch.rows, None, case.batch.block_table, found, 8, heads, kv_dtype)
    torch.testing.assert_close(qkv[:, :heads], q)
    if kv_dtype == "auto":
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:  # where the last bit of a sum differs, a code may be the next one
        different = (found != expected).float().mean()
        assert different < 0.01


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_store_writes_the_same_bytes(kv_dtype: str) -> None:
    case = Case([1, 20, 3], [33, 0, 15], 4, 2, 64, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(24, 2, 64, generator=generator).to(DEVICE) for _ in range(2))
    k[0, 1] = 0
    v[2] *= 1e-30
    expected, found = case.kv.clone(), case.kv.clone()
    store_kv_reference(k, v, expected, case.batch)
    qkv, flat = torch.cat((case.q, k, v), dim=1), torch.zeros(64, 32, device=DEVICE)  # a rotation by nothing
    norm_rope_store(qkv, None, None, 0.0, flat + 1, flat, case.batch.positions, case.batch.rows, None,
                    case.batch.block_table, found, 16, 4, kv_dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 300), st.integers(1, 40_000)), min_size=1, max_size=9), st.integers(1, 16),
       st.none() | st.integers(1, 5000))
def test_a_few_rows_are_cut_as_many_are(lengths: list[int], kv_heads: int, window: int | None) -> None:
    slots = np.arange(len(lengths))[::-1] + 3
    many = splits.decode_splits(np.arange(len(lengths)), slots, np.array(lengths), kv_heads, window)
    assert splits.few_decode_splits(slots.tolist(), lengths, kv_heads, window) == many.ravel().tolist()
