"""Attention in one order of summation: a row has the same bits as a new token, in any chunk, and in any batch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from spillover.kernels.batch import DecodeScratch, DeviceWork
from spillover.kernels.triton.attention import ordered_splits as splits
from spillover.kernels.triton.attention.attention import make_work
from support.kernels.paged_attention import DEVICE, DTYPES, TOLERANCE, Case, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [
    (4, 2, 64, 16), (8, 1, 128, 32), (5, 1, 24, 8), (2, 2, 32, 256),
])
def test_a_mixed_batch(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = Case([1, 7, 1, 1, 130], [300, 0, 0, 63, 17], heads, kv_heads, dim, block_size, dtype)
    assert error(case.found(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 300])
def test_a_few_new_tokens_of_long_sequences(window: int | None) -> None:
    case = Case([1, 7, 16, 17, 2], [1100, 1100, 1030, 1030, 30], 4, 2, 32, window=window)
    work = make_work(case.batch, 4, 2, 32, window)
    assert work.short is not None
    assert {row[0] for row in work.short.tolist()} == {1, 8}  # the others have too many new tokens, or are too short
    assert error(case.found(sinks=True), case.expected(sinks=True)) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("window", [None, 100])
def test_a_few_new_tokens_of_many_sequences_are_attended_whole(window: int | None, kv_dtype: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "BUSY", 16)  # two key heads of four sequences are half of it
    case = Case([5, 1, 16, 2, 3, 30], [300, 70, 130, 0, 255, 40], 4, 2, 32, window=window, kv_dtype=kv_dtype)
    work = make_work(case.batch, 4, 2, 32, window)
    assert work.short is not None
    assert [(row[0], row[5]) for row in sorted(work.short.tolist())] == [(0, 1), (6, 1), (22, 1), (24, 1)]
    assert error(case.found(sinks=True), case.expected(sinks=True)) < 1e-5


@pytest.mark.parametrize("window", [1, 9, 64, 100])
def test_a_sliding_window_with_sinks(window: int) -> None:
    case = Case([1, 1, 5, 140], [300, 2, 70, 0], 4, 2, 64, window=window)
    assert error(case.found(sinks=True), case.expected(sinks=True)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_pool_of_codes(kv_dtype: str, dtype: torch.dtype) -> None:
    case = Case([1, 3, 1, 40], [270, 5, 0, 20], 4, 2, 64, dtype=dtype, kv_dtype=kv_dtype)
    assert error(case.found(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("kv_dtype", "busy"), [
    ("auto", splits.BUSY), ("fp8", splits.BUSY), ("int8", splits.BUSY), ("auto", 2)])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_as_a_new_token_and_in_its_prompt(busy: int, window: int | None, kv_dtype: str,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is equal to the bit on a GPU; the interpreter's products depend on the number of rows."""
    monkeypatch.setattr(splits, "BUSY", busy)
    for cached in (0, 1230):
        chunk = Case([70], [cached], 2, 1, 32, 64, dtype=DTYPES[1], kv_dtype=kv_dtype, window=window)
        expected, parts = chunk.found(sinks=True), [(0, 1), (50, 51), (60, 69), (69, 70)]
        # One row, and a few, after 1,230 others: in pieces, or whole if one program is enough to keep a device busy.
        for first, last in parts:
            found = chunk.attend(*chunk.part(0, first, last), sinks=True)
            exact = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {}
            torch.testing.assert_close(found, expected[first:last], **exact)


def test_a_request_has_the_same_bits_alone_and_among_others() -> None:
    case = Case([1, 1, 1, 200], [600, 64, 255, 40], 4, 2, 64)
    together = case.found()
    for request in range(4):
        first, last = (int(case.batch.query_start[request + end]) for end in range(2))
        assert torch.equal(case.attend(*case.part(request, 0, last - first)), together[first:last])


def test_a_prompt_has_the_same_bits_whatever_its_chunks() -> None:
    whole = Case([300], [0], 2, 1, 32)
    expected = whole.found()
    for first, last in ((0, 130), (130, 132), (132, 300)):
        assert torch.equal(whole.attend(*whole.part(0, first, last)), expected[first:last])


@pytest.mark.parametrize("busy", [1, 10**9])
def test_the_same_bits_whether_one_program_takes_a_sequence_or_many_share_it(
        busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine calls it: with padding items, tables in another order, and twice in a row."""
    case = Case([1, 1, 1], [600, 3, 300], 4, 2, 64)
    expected = case.found()
    assert error(expected, case.expected()) < 1e-5
    monkeypatch.setattr(splits, "BUSY", busy)
    slots = np.array([5, 0, 2])
    items = splits.decode_splits(np.arange(3), slots, case.batch.seq_lens.cpu().numpy().astype(np.int64), 2, None)
    assert len(items) == (3 if busy == 1 else 5 + 1 + 3)
    room = splits.max_splits(3, 1024, 2) if busy > 1 else 3
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


@pytest.mark.parametrize(("length", "window", "pieces"), [(8192 + 3 * 512 + 70, None, 8 + 28 + 4),
                                                         (8192 + 3 * 512 + 70, 1000, 9), (1500, None, 10)])
def test_long_sequences_are_cut_into_larger_pieces(length: int, window: int | None, pieces: int) -> None:
    items = splits.decode_splits(np.array([0]), np.array([0]), np.array([length]), 1, window)
    assert len(items) == pieces
    if window is not None or length < 2000:  # the others take long in the interpreter
        case = Case([1, 1], [length - 1, 500], 2, 1, 16, 64, window=window)
        assert error(case.found(), case.expected()) < 1e-5


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 300), st.integers(1, 40_000)), min_size=1, max_size=9), st.integers(1, 16),
       st.none() | st.integers(1, 5000))
def test_items_cover_every_key_once_and_end_where_pieces_do(lengths: list[int], kv_heads: int,
                                                             window: int | None) -> None:
    items = splits.decode_splits(np.arange(len(lengths)), np.arange(len(lengths)), np.array(lengths), kv_heads, window)
    bounds, places = set(splits.bounds(window)), set()
    for row, length in enumerate(lengths):
        mine = sorted(items[items[:, 0] == row].tolist(), key=lambda item: item[6])
        oldest = 0 if window is None else length - window
        assert (mine[0][2], mine[-1][3]) == (max(oldest, 0) // splits.TILE * splits.TILE, length)
        assert all(left[3] == right[2] and left[3] in bounds for left, right in itertools.pairwise(mine))
        assert [item[4:7] for item in mine] == [[oldest, len(mine), part] for part in range(len(mine))]
        assert {tuple(item[8:]) for item in mine} == {(1, length)}
        if len(mine) > 1:
            taken = set(range(mine[0][7], mine[0][7] + len(mine)))
            assert not taken & places
            places |= taken
    assert len(items) <= splits.max_splits(len(lengths), max(lengths), kv_heads)
    assert max(places, default=-1) < len(items)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 300), st.integers(1, 40_000)), min_size=1, max_size=9), st.integers(1, 16),
       st.none() | st.integers(1, 5000))
def test_a_few_rows_are_cut_as_many_are(lengths: list[int], kv_heads: int, window: int | None) -> None:
    slots = np.arange(len(lengths))[::-1] + 3
    many = splits.decode_splits(np.arange(len(lengths)), slots, np.array(lengths), kv_heads, window)
    assert splits.few_decode_splits(slots.tolist(), lengths, kv_heads, window) == many.ravel().tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(20, 70_000)), min_size=1, max_size=9),
       st.none() | st.integers(1, 5000))
def test_short_chunks_keep_within_their_room(requests: list[tuple[int, int]], window: int | None) -> None:
    counts, lengths = np.array(requests).T
    for room, kv_heads in itertools.product((0, 40, splits.MOST_ITEMS), (1, 60)):
        few, whole = splits.short_chunks(counts, lengths, kv_heads, room, room // 2)
        items = splits.short_chunk_splits(np.flatnonzero(few), np.flatnonzero(few), lengths[few], counts[few], window,
                                          whole)
        assert len(items) <= (room if whole else room // 2)
        assert not whole or (len(items) == few.sum() >= splits.BUSY // 2 / kv_heads and (items[:, 5] == 1).all())
        assert ((counts[few] > 1) & (counts[few] <= splits.QUERIES)).all()
        for row, count in zip(np.flatnonzero(few), counts[few], strict=True):
            mine = sorted(items[items[:, 0] == row].tolist(), key=lambda item: item[6])
            oldest = 0 if window is None else max(lengths[row] - count + 1 - window, 0)
            assert (mine[0][2], mine[-1][3]) == (oldest // splits.TILE * splits.TILE, lengths[row])
            assert all(left[3] == right[2] for left, right in itertools.pairwise(mine))
