"""Attention of few requests in one kernel, emulated without a GPU, has the bits of the separate kernels that it
replaces."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spillover.kernels import native
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.cuda import attention_few as few
from spillover.kernels.cuda.attention import KernelConfig
from spillover.kernels.triton.attention.attention import attention, make_work
from spillover.kernels.triton.rope_store import norm_rope_store
from support.kernels.emulated_cuda import EmulatedModule
from support.kernels.paged_attention import DEVICE, DTYPES, Case

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")

EPS = 1e-6
LENGTHS = [1, 64, 65, 129, 1100]  # near the limits of tiles, pieces and blocks; the last one has pieces of two rounds
# Emulated products, and multiply-adds in the interpreter, are rounded at other points.
EXACT = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {"rtol": 2e-3, "atol": 1e-3}


def emulated(source: Path, config: KernelConfig, device: torch.device, late: bool = True) -> EmulatedModule:
    """Stand in for a GPU's kernels; if `late`, copies into shared memory complete only when they are waited for."""
    return EmulatedModule(source, config.options, late)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(few, "kernels", emulated)
    monkeypatch.setattr(few, "REQUESTS", len(LENGTHS))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPES[1])


class Step:
    """A step of requests with one new token each."""

    def __init__(self, heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, sinks: bool,
                 normed: bool, lengths: list[int] | None = None, dtype: torch.dtype = DTYPES[1]) -> None:
        lengths = lengths or LENGTHS
        self.case = Case([1] * len(lengths), [length - 1 for length in lengths], heads, kv_heads, dim, block_size,
                         dtype, window=window)
        self.heads, self.window, self.sinks = heads, window, self.case.sinks if sinks else None
        self.angles = torch.rand(1200, dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        self.norms = (random(dim, seed=2), random(dim, seed=3)) if normed else (None, None)
        self.qkv = random(len(lengths), heads + 2 * kv_heads, dim, seed=4).to(dtype)
        self.batch = replace(self.case.batch, work=make_work(self.case.batch, heads, kv_heads, dim, window))

    def few(self, pool: Tensor, batch: AttentionBatch | None = None) -> Tensor | None:
        return few.attend_few(self.qkv, *self.norms, EPS, self.angles.cos(), self.angles.sin(), pool,
                              batch or self.batch, self.heads, self.case.scale, self.window, self.sinks)

    def one_after_another(self, pool: Tensor) -> Tensor:
        qkv = self.qkv.clone()
        norm_rope_store(qkv, *self.norms, EPS, self.angles.cos(), self.angles.sin(), self.batch.positions,
                        self.batch.rows, None, self.batch.block_table, pool, self.batch.block_size, self.heads)
        return attention(qkv[:, :self.heads], pool, self.batch, self.case.scale, self.window, self.sinks)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window", "sinks", "normed"), [
    (4, 2, 64, 16, None, False, True),
    (4, 2, 64, 32, 100, True, False),
    (8, 1, 128, 16, None, True, True),  # groups of eight rows have no space for the new key
    (15, 1, 64, 16, None, False, False),
    (16, 1, 64, 16, 200, False, True),
    (6, 2, 128, 64, 100, True, True),
    (2, 1, 256, 16, None, False, True),
])
def test_it_is_norm_rotation_store_and_attention(heads: int, kv_heads: int, dim: int, block_size: int,
                                                 window: int | None, sinks: bool, normed: bool) -> None:
    step = Step(heads, kv_heads, dim, block_size, window, sinks, normed)
    pool, other = step.case.kv, step.case.kv.clone()
    found = step.few(pool)
    assert found is not None
    torch.testing.assert_close(found, step.one_after_another(other), **EXACT)
    torch.testing.assert_close(pool.nan_to_num(), other.nan_to_num(), **EXACT)
    assert step.batch.work is not None
    assert step.batch.work.scratch is not None
    assert not step.batch.work.scratch.finished.any()


def test_copies_into_shared_memory_may_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal if emulated copies complete at once or when waited for: no data is used in between."""
    step = Step(4, 1, 128, 16, None, False, True, [130, 1100])
    pool = step.case.kv.clone()
    late = step.few(pool)
    if DEVICE == "cpu":
        monkeypatch.setattr(few, "kernels", partial(emulated, late=False))
    again = step.case.kv.clone()
    at_once = step.few(again)
    assert late is not None
    assert at_once is not None
    assert torch.equal(late, at_once)
    assert torch.equal(pool.nan_to_num(), again.nan_to_num())


def test_a_request_has_the_same_bits_beside_another() -> None:
    together, alone = (Step(4, 2, 64, 16, None, False, True, lengths) for lengths in ([300, 70], [300]))
    alone.case.kv[alone.batch.block_table[0].long()] = together.case.kv[together.batch.block_table[0].long()]
    alone.qkv = together.qkv[:1]
    both, one = together.few(together.case.kv), alone.few(alone.case.kv)
    assert both is not None
    assert one is not None
    assert torch.equal(both[:1], one)


def test_items_that_do_not_count_are_left_out() -> None:
    """Padding items are skipped: a CUDA graph has programs for the maximum number of items."""
    step = Step(4, 2, 64, 16, None, False, False, [200, 64])
    expected = step.few(step.case.kv)
    work = step.batch.work
    assert work is not None
    assert work.splits is not None
    padded = torch.cat((work.splits, torch.full_like(work.splits[:2], 7)))
    found = step.few(step.case.kv, replace(step.batch, work=replace(work, splits=padded)))
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)


def test_who_is_served_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(4, 2, 64, 16, None, False, False, [30, 40])
    pool, work = step.case.kv, step.batch.work
    assert work is not None
    assert step.few(pool) is not None
    assert step.few(pool, replace(step.batch, kv_dtype="fp8")) is None
    assert step.few(pool, replace(step.batch, work=replace(work, tiles=torch.zeros(1, 2)))) is None
    assert step.few(pool, replace(step.batch, block_size=8)) is None
    for shape in ((4, 2, 64, 16, torch.float32), (4, 2, 32, 16, DTYPES[1]), (17, 1, 64, 16, DTYPES[1])):
        *numbers, dtype = shape
        other = Step(*numbers, None, False, False, [30, 40], dtype)
        assert other.few(other.case.kv) is None
    monkeypatch.setattr(few, "REQUESTS", 1)
    assert step.few(pool) is None
    monkeypatch.setattr(few, "REQUESTS", 2)
    with monkeypatch.context() as small:  # a GPU with less shared memory
        small.setattr(few, "shared_bytes", lambda *_: 1 << 30)
        assert step.few(pool) is None
    monkeypatch.setattr(few, "kernels", lambda *_: None)
    assert step.few(pool) is None
