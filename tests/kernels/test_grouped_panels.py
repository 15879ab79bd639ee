"""Grouped integers, as in AWQ, GPTQ and compressed-tensors, stay in codes on a CPU and are multiplied directly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.kernels import native
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.grouped_int import GroupedInt, RoundedInt
from spillover.kernels.formats.grouped_panels import GroupedPanels
from spillover.kernels.formats.packed import CODES
from spillover.kernels.linear import embedding, linear
from spillover.kernels.quantize import round_to_int
from spillover.models.weight_specs import Source, WeightSpec, kept_on
from support.models.coded_weights import room

needs_codes = pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")
CPU = torch.device("cpu")


def made(base: GroupedInt, shape: LinearShape, seed: int) -> tuple[Linear, Linear]:
    """Return a weight as stored in a checkpoint, and as kept on a CPU."""
    random = torch.Generator().manual_seed(seed)
    target = Target("float32", CPU)
    tensors = base.dummy(shape, 0, target, random)
    named = dict(zip((field.name for field in base.fields(shape, "float32")), tensors, strict=True))
    if base.zeros:
        named["zeros"].copy_(torch.randint(0, 1 << base.bits, named["zeros"].shape, generator=random))
    if base.ordered:
        for order in named["order"]:
            order.copy_(torch.randperm(shape.in_features, generator=random))
    form = base.packed(16, shape)
    assert isinstance(form, GroupedPanels)
    kept = Linear(form, shape, form.packed_tensors(shape, tensors, target))
    assert [(field.dtype, field.shape) for field in form.fields(shape, "float32")] == [
        (str(tensor.dtype).removeprefix("torch."), tensor.shape) for tensor in kept.tensors]
    return Linear(base, shape, tensors), kept


@needs_codes
@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([4, 8]), group=st.sampled_from([32, 64, 128, 0]), zeros=st.booleans(),
       ordered=st.booleans(), dtype=st.sampled_from(["float16", "bfloat16"]),
       sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3), groups=st.integers(1, 3), rows=st.integers(1, 20),
       bias=st.booleans(), seed=st.integers(0, 999))
def test_products_are_those_of_the_checkpoint(bits: int, group: int, zeros: bool, ordered: bool, dtype: str,
                                              sizes: list[int], groups: int, rows: int, bias: bool, seed: int) -> None:
    shape = LinearShape(tuple(sizes), groups * (group or 96))
    stored, kept = made(GroupedInt(bits, group, dtype, zeros, ordered), shape, seed)
    exact = stored.format.dequantize(stored, torch.float32)
    assert torch.equal(kept.format.dequantize(kept, torch.float32), exact)
    ids = torch.arange(shape.out_features).flip(0)
    assert torch.equal(embedding(ids, kept), exact[ids])
    x = torch.randn(rows, shape.in_features, generator=torch.Generator().manual_seed(seed))
    added = torch.randn(shape.out_features, generator=torch.Generator().manual_seed(seed)) if bias else None
    found = linear(x, kept, added)
    error = found.double() - x.double() @ exact.double().T - (0 if added is None else added.double())
    widest = torch.full_like(exact, float((1 << bits) * stored.tensors[1].abs().max()))  # offsets may be larger
    assert (error.abs() <= room(x, widest) + 1e-6 * found.abs()).all()
    for row in {0, rows - 1}:
        assert torch.equal(linear(x[row : row + 1], kept, added), found[row : row + 1])


@needs_codes
def test_a_cpu_keeps_what_fits_and_counts_it() -> None:
    def kept(base: GroupedInt, columns: int, dtype: str = "float32") -> WeightSpec:
        spec = WeightSpec("o", (64, columns), (Source(("o",), (64,)),), base)
        return kept_on({"layers.0": [spec]}, "cpu", dtype)["layers.0"][0]

    four = GroupedInt(4, 128, "float16")
    assert isinstance(kept(four, 512).format, GroupedPanels)
    # Codes, a float32 scale and offset per 128 columns, and the list of matrices.
    assert kept(four, 512).nbytes("float32") == 64 * 512 // 2 + 64 * 4 * 8 + 128
    for odd in (kept(four, 320), kept(GroupedInt(4, 40, "float16"), 320), kept(four, 512, "bfloat16")):
        assert type(odd.format) is GroupedInt
    assert kept(GroupedInt(8, 0, "float32"), 96).format.panel_kind == CODES  # type: ignore[union-attr]
    assert kept(GroupedInt(4, 32, "float16", ordered=True), 96).format.panel_kind is None  # type: ignore[union-attr]


class Numbers:
    """A reader of a checkpoint with one unquantised matrix."""

    matrices = (("w.weight", 48),)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def read(self, tensor: Field) -> torch.Tensor:
        assert (tensor.name, tensor.shape) == ("w.weight", self.weight.shape)
        return self.weight


@needs_codes
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_rounded_while_they_are_loaded(bits: int) -> None:
    weight, shape = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)), LinearShape((48,), 128)
    form = GroupedPanels(RoundedInt(bits, 64, "bfloat16"))
    kept = Linear(form, shape, form.load(Numbers(weight), shape, Target("float32", CPU)))  # type: ignore[arg-type]
    rounded = round_to_int(weight, bits, 64, torch.bfloat16)
    exact = rounded.codes.float() * rounded.scales.float().repeat_interleave(64, 1)
    assert torch.equal(form.dequantize(kept, torch.float32), exact)
    assert (exact - weight).abs().mean() < (0.15 if bits == 4 else 0.01)


@needs_codes
def test_made_up_experts_are_stacks_of_panels() -> None:
    form, shape = GroupedPanels(GroupedInt(4, 32, "float16")), LinearShape((16, 16), 64)
    (stack,) = form.dummy(shape, 3, Target("float32", CPU), torch.Generator().manual_seed(0))
    assert stack.shape == (3, *form.fields(shape, "float32")[0].shape)
    second = Linear(form, shape, (stack,)).expert(1)
    assert linear(torch.randn(2, 64), second).shape == (2, 32)
