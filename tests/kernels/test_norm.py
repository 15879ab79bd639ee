"""Normalised rows equal the reference, in any batch."""

import pytest
import torch

from spillover.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

EPS = 1e-5


@pytest.mark.parametrize("dim", [1, 7, 64, 80, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_rms_norm_is_the_reference(rows: int, dim: int) -> None:
    x, residual, weight = torch.randn(rows, dim) * 3, torch.randn(rows, dim), torch.randn(dim)
    torch.testing.assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    normed, total = add_rms_norm(x, residual, weight, EPS)
    wanted, wanted_total = add_rms_norm_reference(x, residual, weight, EPS)
    torch.testing.assert_close(normed, wanted)
    assert torch.equal(total, wanted_total)
    assert torch.equal(normed[:1], add_rms_norm(x[:1], residual[:1], weight, EPS)[0])


def test_heads_within_a_wider_row() -> None:
    rows = torch.randn(6, 5 * 16)
    weight = torch.randn(16)
    heads = rows[:, 16:64].view(6, 3, 16)
    torch.testing.assert_close(rms_norm(heads, weight, EPS), rms_norm_reference(heads, weight, EPS))
    torch.testing.assert_close(
        rms_norm(heads.transpose(0, 1), weight, EPS), rms_norm(heads, weight, EPS).transpose(0, 1)
    )


def test_half_precision_is_cast_back_before_the_weight() -> None:
    x, weight = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)
    wanted = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).bfloat16() * weight
    assert torch.equal(rms_norm(x, weight, EPS), wanted)
