"""A step of few rows with fewer kernels has the bits of the separate kernels that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spillover.kernels.triton import ordered_linear
from spillover.kernels.triton.norm import add_rms_norm
from support.kernels.paged_attention import DEVICE, DTYPES

EPS = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPES[1])


def same(found: Tensor, expected: Tensor) -> None:
    """Compare to the bit on a GPU; the interpreter's products depend on the shape of a tile."""
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
