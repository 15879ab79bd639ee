"""Paged attention on the device computes what the plain one does, and a request's bits do not depend on its batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from spillover.kernels.attention import attention_reference, store_kv_reference
from spillover.kernels.batch import AttentionBatch, DecodeScratch, DeviceWork
from spillover.kernels.kv_quant import head_bytes
from spillover.kernels.norm import rms_norm_reference
from spillover.kernels.rope import rope_reference
from spillover.kernels.triton.attention import attention_splits as splits
from spillover.kernels.triton.attention.attention import attention
from spillover.kernels.triton.rope_store import norm_rope_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no products in bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


class Case:
    """A random batch over a pool that holds NaN where nothing was stored."""

    def __init__(self, counts: list[int], cached: list[int], heads: int = 4, kv_heads: int = 2, dim: int = 32,
                 block_size: int = 16, dtype: torch.dtype = torch.float32, kv_dtype: str = "auto", seed: int = 0,
                 window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [a + b for a, b in zip(counts, cached, strict=True)]
        width = -(-max(lengths) // block_size)
        blocks = len(counts) * width + 1
        size = block_size * dim if kv_dtype == "auto" else head_bytes(block_size, dim)
        shape = (blocks, 2, 2, kv_heads, size)
        pool = (torch.full(shape, float("nan"), dtype=dtype) if kv_dtype == "auto"
                else torch.full(shape, 255, dtype=torch.uint8))
        order = torch.randperm(blocks - 1, generator=generator).int() + 1
        table = order.view(len(counts), width)
        self.kv = pool.to(DEVICE)[:, 1]
        self.scale, self.window, self.heads, self.dim = 1 / math.sqrt(dim), window, heads, dim
        self.batch = self._batch(counts, cached, table, block_size, kv_dtype)
        whole = self._batch(lengths, [0] * len(counts), table, block_size, kv_dtype)
        k, v = (torch.randn(sum(lengths), kv_heads, dim, generator=generator).to(DEVICE, dtype) for _ in range(2))
        store_kv_reference(k, v, self.kv, whole)
        self.q = torch.randn(sum(counts), heads, dim, generator=generator).to(DEVICE, dtype)
        self.sinks = torch.randn(heads, generator=generator).to(DEVICE)

    @staticmethod
    def _batch(counts: list[int], cached: list[int], table: Tensor, block_size: int, kv_dtype: str) -> AttentionBatch:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([a + b for a, b in zip(counts, cached, strict=True)], dtype=torch.int32)
        positions = torch.cat([torch.arange(b, a + b) for a, b in zip(counts, cached, strict=True)])
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
        return AttentionBatch(*(x.to(DEVICE) for x in (starts, lengths, table, positions, rows)), block_size,
                              max(counts), int(lengths.max()), kv_dtype)

    def expected(self, sinks: bool = False) -> Tensor:
        return attention_reference(self.q.float(), self.kv if self.batch.kv_dtype != "auto" else self.kv.float(),
                                   self.batch, self.scale, self.window, self.sinks if sinks else None)

    def found(self, sinks: bool = False) -> Tensor:
        return attention(self.q, self.kv, self.batch, self.scale, self.window, self.sinks if sinks else None)


def error(found: Tensor, expected: Tensor) -> float:
    assert not found.isnan().any()
    return float((found.float() - expected).norm() / expected.norm())


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
        rows = slice(int(case.batch.query_start[request]), int(case.batch.query_start[request + 1]))
        count = rows.stop - rows.start
        alone = replace(
            case.batch, query_start=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
            seq_lens=case.batch.seq_lens[request:request + 1], block_table=case.batch.block_table[request:request + 1],
            positions=case.batch.positions[rows], rows=torch.zeros(count, dtype=torch.int32, device=DEVICE))
        assert torch.equal(attention(case.q[rows], case.kv, alone, case.scale, None, None), together[rows])


def test_a_prompt_has_the_same_bits_whatever_its_chunks() -> None:
    whole = Case([300], [0], 4, 2, 32)
    expected = whole.found()
    for first, last in ((0, 130), (130, 132), (132, 300)):
        chunk = replace(
            whole.batch, query_start=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor([last], dtype=torch.int32, device=DEVICE),
            positions=whole.batch.positions[first:last], rows=whole.batch.rows[first:last])
        assert torch.equal(attention(whole.q[first:last], whole.kv, chunk, whole.scale, None, None),
                           expected[first:last])


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
        assert torch.equal(attention(case.q, case.kv, batch, case.scale, None, None), expected)
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
