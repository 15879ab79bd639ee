"""MXFP4 as defined by OCP: representable values survive a round trip, others are rounded to the nearest."""

import pytest
import torch

from spillover.kernels.formats.mxfp4 import GROUP, VALUES, dequantize, quantize


def test_the_low_nibble_comes_first() -> None:
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0] = 0x72  # 1.0, then 6.0
    blocks[0, 1] = 0x8F  # -6.0, then -0.0
    values = dequantize(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert values.shape == (GROUP,)
    assert values[:4].tolist() == [2.0, 12.0, -12.0, -0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_quantized_once_does_not_change_again(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, 4 * GROUP) * 10 ** torch.linspace(-6, 6, 5)[:, None]
    values[0, 0, :GROUP] = 0
    blocks, scales = quantize(values)
    assert blocks.shape == (3, 5, 4, 16)
    assert scales.shape == (3, 5, 4)
    once = dequantize(blocks, scales, dtype)
    assert once.dtype is dtype
    assert torch.equal(dequantize(*quantize(once), dtype), once)


def test_every_value_goes_to_the_nearest() -> None:
    values = torch.rand(64, GROUP) * 12 - 6
    values[:, 0] = 6.0  # fixes the scale at 1
    table = torch.tensor(VALUES)
    nearest = (values[..., None] - table).abs().amin(-1)
    error = (dequantize(*quantize(values), torch.float32) - values).abs()
    torch.testing.assert_close(error, nearest)
