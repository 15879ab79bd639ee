"""The gated activations equal the reference over the whole range of floats."""

import pytest
import torch

from spillover.kernels.activation import (
    clamped_swiglu,
    clamped_swiglu_reference,
    silu_and_mul,
    silu_and_mul_reference,
)


@pytest.mark.parametrize("width", [1, 5, 16, 48, 1536])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_gates_are_the_reference(rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width) * 6
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(clamped_swiglu(x, 7.0), clamped_swiglu_reference(x, 7.0), rtol=1e-6, atol=1e-6)
    assert torch.equal(silu_and_mul(x)[-1:], silu_and_mul(x[-1:]))


def test_silu_is_within_a_few_ulp_everywhere() -> None:
    gate = torch.linspace(-86, 100, 400_001)
    y = silu_and_mul(torch.stack((gate, torch.ones_like(gate)), dim=1))[:, 0].double()
    wanted = gate.double() * torch.sigmoid(gate.double())
    ulp = torch.finfo(torch.float32).eps
    assert ((y - wanted).abs() <= 3 * ulp * wanted.abs()).all()


def test_extremes() -> None:
    gate = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30, -1e30, -200.0, 0.0])
    y = silu_and_mul(torch.stack((gate, torch.ones_like(gate)), dim=1))[:, 0]
    assert y[0] == float("inf")
    assert y[1].isnan() or y[1] == 0  # -inf * 0, as in torch
    assert y[2].isnan()
    assert y[3:].tolist() == [torch.tensor(1e30).item(), 0.0, 0.0, 0.0]
