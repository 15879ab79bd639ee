"""A CPU multiplies with FP8 as with its dequantised weights, to the bit."""

from __future__ import annotations

import pytest
import torch

from spillover.kernels import native
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.fp8_block import FP8_BLOCK, FP8_TENSOR, Fp8Block
from spillover.kernels.formats.fp8_panels import Fp8Panels
from spillover.kernels.formats.fp8_rows import Fp8Rows
from spillover.kernels.formats.packed import pack
from spillover.kernels.linear import linear

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.describe())
TARGET = Target("float32", torch.device("cpu"))


@pytest.mark.parametrize("base", [FP8_BLOCK, FP8_TENSOR, Fp8Rows()], ids=["blocks", "tensor", "rows"])
@pytest.mark.parametrize(("sizes", "columns"), [((1,), 5), ((40,), 128), ((130, 7), 300), ((64, 64, 33), 256)])
def test_products_are_those_of_the_dequantised_weights(base: Fp8Block | Fp8Rows, sizes: tuple[int, ...],
                                                       columns: int) -> None:
    random = torch.Generator().manual_seed(columns)
    shape = LinearShape(sizes, columns)
    form = base.packed(native.panel_width(), shape)
    assert isinstance(form, Fp8Panels)
    stored = base.dummy(shape, 0, TARGET, random)
    codes = torch.randint(0, 256, stored[0].shape, generator=random, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # not a number
    stored = codes.view(torch.float8_e4m3fn), stored[1]
    w = Linear(form, shape, form.packed_tensors(shape, stored))
    assert [tensor.shape for tensor in w.tensors] == [field.shape for field in form.fields(shape, "float32")]
    plain = base.dequantize(Linear(base, shape, stored), torch.float32)
    assert torch.equal(form.dequantize(w, torch.float32), plain)
    bias, whole = torch.randn(sum(sizes), generator=random), pack(plain)
    for rows in (0, 1, 2, 13, 40, 500):
        x = torch.randn(rows, columns, generator=random)
        for added in (None, bias):
            assert torch.equal(linear(x, w, added), linear(x, whole, added)), rows


def test_what_is_not_a_number_stays_so_in_its_channel() -> None:
    shape, random = LinearShape((40,), 300), torch.Generator().manual_seed(1)
    form = FP8_BLOCK.packed(native.panel_width(), shape)
    assert isinstance(form, Fp8Panels)
    values, scales = FP8_BLOCK.dummy(shape, 0, TARGET, random)
    values.view(torch.uint8)[7, 290] = 0xFF
    found = linear(torch.randn(3, 300), Linear(form, shape, form.packed_tensors(shape, (values, scales))))
    assert found.isnan().all(0).nonzero().flatten().tolist() == [7]
    assert found.isnan().any(0).sum() == 1


def test_made_up_experts_are_stacks_of_panels() -> None:
    shape = LinearShape((96,), 160)
    form = FP8_BLOCK.packed(native.panel_width(), shape)
    (stack,) = form.dummy(shape, 3, TARGET, torch.Generator().manual_seed(1))
    (field,) = form.fields(shape, "float32")
    assert stack.shape == (3, *field.shape)
    assert stack[0].shape == field.shape
    assert not torch.equal(stack[0], stack[1])
