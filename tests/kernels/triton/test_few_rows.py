"""What a step of few rows computes in fewer kernels has the bits of the kernels that it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spillover.kernels.triton import ordered_linear
from spillover.kernels.triton.attention import decode_few
from spillover.kernels.triton.attention.attention import attention, make_work
from spillover.kernels.triton.norm import add_rms_norm
from spillover.kernels.triton.rope_store import norm_rope_store
from support.kernels.paged_attention import DEVICE, DTYPES, Case

EPS = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPES[1])


def same(found: Tensor, expected: Tensor) -> None:
    """To the bit on a card; the interpreter's products depend on the shape of a tile."""
    exact = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {}
    torch.testing.assert_close(found, expected, **exact)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_in_the_product_after_it(rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, norm = random(rows, 1024), random(rows, 1024, seed=1), random(1024, seed=2)
    w, bias = random(48, 1024, seed=3) / 32, random(48, seed=4)
    launched: list[bool] = []
    launch = ordered_linear._launch_ahead
    monkeypatch.setattr(ordered_linear, "_launch_ahead", lambda *args: (launched.append(True), launch(*args)))
    found, total = ordered_linear.add_norm_linear(x, residual, norm, EPS, w, bias, gated)
    assert launched == [True]
    normed, expected_total = add_rms_norm(x, residual, norm, EPS)
    monkeypatch.setattr(ordered_linear, "AHEAD_BYTES", 0)
    product = ordered_linear.ordered_linear_silu if gated else ordered_linear.ordered_linear
    assert torch.equal(total, expected_total)
    same(found, product(normed, w, bias))
    assert launched == [True]


@pytest.mark.parametrize("inner", [1536, 3072])
@pytest.mark.parametrize("rows", [1, 5])
def test_weights_that_are_loaded_ahead(rows: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = random(rows, inner), random(20, inner, seed=1) / 32
    assert ordered_linear._ahead_width(x, w, False)
    found = ordered_linear.ordered_linear(x, w)
    monkeypatch.setattr(ordered_linear, "AHEAD_BYTES", 0)
    assert not ordered_linear._ahead_width(x, w, False)
    same(found, ordered_linear.ordered_linear(x, w))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("window", "sinks", "dim", "block_size"), [(None, False, 64, 16), (100, True, 32, 32)])
def test_attention_with_the_norm_the_rotation_and_the_store(window: int | None, sinks: bool, dim: int, block_size: int,
                                                            normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths about the bounds of tiles, pieces and blocks, and one of more than two tiles a piece."""
    lengths, heads, kv_heads = [1, 64, 65, 129, 1100], 4, 2
    monkeypatch.setattr(decode_few, "REQUESTS", len(lengths))
    case = Case([1] * len(lengths), [length - 1 for length in lengths], heads, kv_heads, dim, block_size, DTYPES[1],
                window=window)
    angles = torch.rand(1200, dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    norms = (random(dim, seed=2), random(dim, seed=3)) if normed else (None, None)
    qkv = random(len(lengths), heads + 2 * kv_heads, dim, seed=4)
    batch = replace(case.batch, work=make_work(case.batch, heads, kv_heads, dim, window))
    pool, other, sinks_of = case.kv, case.kv.clone(), case.sinks if sinks else None
    assert decode_few.serves(qkv, batch, kv_heads)
    found = decode_few.decode_few(qkv, *norms, EPS, angles.cos(), angles.sin(), pool, batch, heads, case.scale, window,
                                  sinks_of)
    norm_rope_store(qkv, *norms, EPS, angles.cos(), angles.sin(), batch.positions, batch.rows, None, batch.block_table,
                    other, block_size, heads)
    assert torch.equal(found, attention(qkv[:, :heads], other, batch, case.scale, window, sinks_of))
    assert torch.equal(pool.nan_to_num(), other.nan_to_num())
    assert batch.work is not None
    assert batch.work.scratch is not None
    assert not batch.work.scratch.finished.any()


def test_who_is_served_otherwise() -> None:
    case = Case([1, 1], [30, 40], 4, 2, 64, dtype=DTYPES[1])
    work = make_work(case.batch, 4, 2, 64, None)
    qkv, batch = random(2, 8, 64), replace(case.batch, work=work)
    assert decode_few.serves(qkv, batch, 2)
    assert not decode_few.serves(qkv.float(), batch, 2)
    assert not decode_few.serves(random(2, 8, 48), batch, 2)
    assert not decode_few.serves(random(decode_few.REQUESTS + 1, 8, 64), batch, 2)
    assert not decode_few.serves(qkv, replace(batch, kv_dtype="fp8"), 2)
    assert not decode_few.serves(qkv, replace(batch, work=replace(work, tiles=torch.zeros(1, 2))), 2)
