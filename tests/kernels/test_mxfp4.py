"""MXFP4 as defined by OCP: representable values survive a round trip, others are rounded to the nearest."""

import pytest
import torch

from spillover.kernels import native
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.fp4_panels import Fp4Panels
from spillover.kernels.formats.mxfp4 import GROUP, MXFP4, VALUES, dequantize, quantize
from spillover.kernels.linear import linear


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


@pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")
@pytest.mark.parametrize("sizes", [(40,), (64, 7), (5, 5, 90)])
def test_a_cpu_multiplies_with_the_codes(sizes: tuple[int, ...]) -> None:
    shape, random = LinearShape(sizes, 5 * GROUP), torch.Generator().manual_seed(1)
    form = MXFP4.packed(native.panel_width(), shape)
    assert form == Fp4Panels(MXFP4)
    target = Target("float32", torch.device("cpu"))
    values, scales = MXFP4.dummy(shape, 0, target, random)
    scales[:2] = torch.tensor([0, 1, 2, 254, 127, 0, 0, 0], dtype=torch.uint8)  # the smallest and largest
    w = Linear(form, shape, form.packed_tensors(shape, (values, scales)))
    assert [tensor.shape for tensor in w.tensors] == [field.shape for field in form.fields(shape, "float32")]
    plain = MXFP4.dequantize(Linear(MXFP4, shape, (values, scales)), torch.float32)
    assert torch.equal(form.dequantize(w, torch.float32), plain)
    x, bias = torch.randn(9, shape.in_features, generator=random), torch.randn(sum(sizes), generator=random)
    found = linear(x, w, bias)
    torch.testing.assert_close(found[:, 2:], (x @ plain.T + bias)[:, 2:], rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(x[3:4], w, bias), found[3:4])
    stack = form.dummy(shape, 3, target, random)
    assert [tensor.shape for tensor in stack] == [(3, *field.shape) for field in form.fields(shape, "float32")]
