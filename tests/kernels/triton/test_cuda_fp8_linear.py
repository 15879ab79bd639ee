"""Products of FP8 weights and activations are those of rounded activations, with the same bits at every number of rows.

Without a card the kernels run emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from spillover.kernels.cuda import fp8_linear as cuda
from spillover.kernels.cuda.fp8_linear import Cut, Form, Shape, fp8_linear
from spillover.kernels.formats.fp8_block import dequantize
from support.emulated_cuda import EmulatedModule, described

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def _emulated(cut: Cut, form: Form, dtype: torch.dtype, device: torch.device) -> EmulatedModule:
    return EmulatedModule(cuda.SOURCE, cut.options(form, dtype), late=True)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(cuda, "kernels", _emulated)
            patch.setattr(cuda, "tensor_map", described)
        yield


def made(seed: int, channels: int, inner: int, blocked: bool) -> tuple[Tensor, Tensor]:
    """Make up values and scales."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(channels, inner, generator=random).mul_(20).to(torch.float8_e4m3fn)
    shape = (-(-channels // 128), inner // 128) if blocked else (channels,)
    return values.to(DEVICE), (0.001 + 0.002 * torch.rand(shape, generator=random)).to(DEVICE)


def inputs(seed: int, rows: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=random) * 3 + 0.1
    return (torch.randn(rows, inner, generator=random) * spread).to(dtype).to(DEVICE)


def rounded(x: Tensor, blocked: bool, input_scale: Tensor | None = None) -> Tensor:
    """The numbers that activations are rounded to, in float64."""
    wide = x.float().unflatten(1, (-1, 128)) if blocked else x.float()
    if input_scale is None:
        largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        inverse, scale = 448 / largest, largest / 448
    else:
        inverse, scale = 1 / input_scale, input_scale
    codes = (wide * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).reshape(x.shape)


def weight(values: Tensor, scales: Tensor) -> Tensor:
    if scales.dim() == 2:
        return dequantize(values, scales, torch.float64)
    return values.double() * scales[:, None].double()


def assert_near(found: Tensor, x: Tensor, exact: Tensor, bias: Tensor | None = None) -> None:
    expected = x @ exact.T + (0 if bias is None else bias.double())
    magnitude = x.abs() @ exact.abs().T
    step = 2.0 ** (-8 if found.dtype is torch.bfloat16 else -11)  # half the distance of numbers in the result
    # The tensor cores of a card add e4m3 products with about 14 bits.
    bound = step * expected.abs() + (2e-6 if DEVICE.type == "cpu" else 1e-3) * magnitude
    assert ((found.double() - expected).abs() <= bound).all()


# Whole products through the cut that many rows have; then other numbers of rows, and all cuts of few and some rows.
@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
def test_a_row_has_the_same_bits_at_every_number_of_rows(blocked: bool) -> None:
    inner = 9 * 128  # three chunks of three steps, and one that is empty
    values, scales = made(1, 192, inner, blocked)
    x = inputs(2, 132, inner)
    whole = fp8_linear(x, values, scales, cut=Cut(128, 2))
    assert_near(whole, rounded(x, blocked), weight(values, scales))
    for rows, cut in ((1, cuda.few_cuts(1)[0]), (3, cuda.few_cuts(3)[1]), (16, cuda.few_cuts(16)[0]), (20, Cut(32, 2)),
                      (40, Cut(64, 1, True, resident=3)), (70, Cut(96, 2, True)), (17, None), (132, None)):
        first = 132 - rows
        assert torch.equal(fp8_linear(x[first:], values, scales, cut=cut), whole[first:]), (rows, cut)
