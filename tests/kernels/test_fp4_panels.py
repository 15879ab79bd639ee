"""NVFP4 stays in codes on a CPU, with the bits of its dequantised weights; test_mxfp4.py has the panels of MXFP4."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.fp4_panels import Fp4Panels
from spillover.kernels.formats.nvfp4 import Nvfp4
from spillover.kernels.linear import embedding, linear
from spillover.models.weight_specs import Source, WeightSpec, kept_on
from support.models.coded_weights import room

pytestmark = pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")
TARGET = Target("float32", torch.device("cpu"))


def made(base: Nvfp4, shape: LinearShape, seed: int) -> tuple[tuple[Tensor, ...], Fp4Panels]:
    """Return tensors of a checkpoint with scales of any finite code, and the format in which a CPU keeps them."""
    random = torch.Generator().manual_seed(seed)
    values, scales, whole = base.dummy(shape, 0, TARGET, random)
    codes = torch.randint(0, 256, scales.shape, dtype=torch.uint8, generator=random)
    codes[codes & 127 == 127] = 1  # not a number; the smallest
    whole *= torch.exp2(torch.randint(-20, 20, whole.shape, generator=random)) * torch.rand(whole.shape,
                                                                                           generator=random)
    form = base.packed(native.panel_width(), shape)
    assert form == Fp4Panels(base)
    return (values, codes.view(torch.float8_e4m3fn), whole), Fp4Panels(base)


@settings(max_examples=60, deadline=None)
@given(divides=st.booleans(), sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3), blocks=st.integers(1, 20),
       rows=st.integers(1, 40), bias=st.booleans(), seed=st.integers(0, 999))
def test_products_are_those_of_the_checkpoint(divides: bool, sizes: list[int], blocks: int, rows: int, bias: bool,
                                              seed: int) -> None:
    base, shape = Nvfp4(divides), LinearShape(tuple(sizes), 32 * blocks)
    tensors, form = made(base, shape, seed)
    kept = Linear(form, shape, form.packed_tensors(shape, tensors))
    exact = base.dequantize(Linear(base, shape, tensors), torch.float32)
    assert torch.equal(form.dequantize(kept, torch.float32), exact)
    ids = torch.arange(shape.out_features).flip(0)
    assert torch.equal(embedding(ids, kept), exact[ids])
    assert torch.equal(form.embedding_lookup(ids, kept), exact[ids])
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, shape.in_features, generator=random)
    added = torch.randn(shape.out_features, generator=random) if bias else None
    found = linear(x, kept, added)
    error = found.double() - x.double() @ exact.double().T - (0 if added is None else added.double())
    assert (error.abs() <= room(x, exact) + 1e-6 * found.abs()).all()
    for row in {0, rows - 1}:
        assert torch.equal(linear(x[row : row + 1], kept, added), found[row : row + 1])


@pytest.mark.parametrize("divides", [False, True])
def test_a_scale_that_is_not_a_number_stays_so_in_its_channel(divides: bool) -> None:
    base, shape = Nvfp4(divides), LinearShape((40,), 96)
    (values, scales, whole), form = made(base, shape, 0)
    scales.view(torch.uint8)[7, 5] = 0xFF
    kept = Linear(form, shape, form.packed_tensors(shape, (values, scales, whole)))
    found = linear(torch.randn(3, 96), kept)
    assert found.isnan().all(0).nonzero().flatten().tolist() == [7]
    assert found.isnan().any(0).sum() == 1


def test_a_cpu_keeps_what_fits_and_counts_it() -> None:
    def kept(columns: int, dtype: str = "float32") -> WeightSpec:
        spec = WeightSpec("o", (64, columns), (Source(("o",), (64,)),), Nvfp4())
        return kept_on({"layers.0": [spec]}, "cpu", dtype)["layers.0"][0]

    # Codes, a byte of scale per 16 columns, a float32 number per row, and the list of matrices.
    assert kept(96).format == Fp4Panels(Nvfp4())
    assert kept(96).nbytes("float32") == 64 * 96 // 2 + 64 * 96 // 16 + 64 * 4 + 128
    assert kept(80).format == kept(96, "bfloat16").format == Nvfp4()


def test_made_up_experts_are_stacks_of_panels() -> None:
    form, shape = Fp4Panels(Nvfp4()), LinearShape((16, 16), 64)
    (stack,) = form.dummy(shape, 3, TARGET, torch.Generator().manual_seed(0))
    assert stack.shape == (3, *form.fields(shape, "float32")[0].shape)
    assert not torch.equal(stack[0], stack[1])
    assert linear(torch.randn(2, 64), Linear(form, shape, (stack,)).expert(1)).std() < 1
