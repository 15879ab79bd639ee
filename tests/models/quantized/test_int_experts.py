"""Experts with integer codes stay in codes on a CUDA device, with the values that the checkpoint defines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.choice import Dequantized
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.int_experts import IntExperts
from spillover.models.weight_specs import Source, WeightSpec, dequantized_experts, kept_on


@pytest.mark.parametrize("base", [
    GroupedInt(4, 32), GroupedInt(4, 128, "bfloat16", zeros=True), GroupedInt(8, 64), GroupedInt(8, 0, zeros=True),
    GroupedInt(4, 256),
], ids=str)
def test_numbers_are_those_of_the_checkpoint(base: GroupedInt) -> None:
    shape, target = LinearShape((128, 128), 256), Target("bfloat16", torch.device("cpu"))
    tensors = list(base.dummy(shape, 0, target, torch.Generator().manual_seed(0)))
    if base.zeros:
        tensors[2].random_(0, 1 << base.bits)
    kept = IntExperts(base)
    made = kept.packed_tensors(shape, tuple(tensors))
    assert [(list(t.shape), t.dtype) for t in made] == [
        (list(field.shape), getattr(torch, field.dtype)) for field in kept.fields(shape, "bfloat16")]
    wanted = base.dequantize(Linear(base, shape, tuple(tensors)), torch.float32)
    assert torch.equal(kept.dequantize(Linear(kept, shape, made), torch.float32), wanted)


def specs(first: GroupedInt, second: GroupedInt, inner: int = 128) -> list[WeightSpec]:
    gate_up = Source(("{expert}.gate", "{expert}.up"), (inner, inner))
    return [WeightSpec("experts.gate_up", (4, 2 * inner, 256), (gate_up,), first),
            WeightSpec("experts.down", (4, 256, inner), (Source(("{expert}.down",), (256,)),), second)]


def kept(listed: list[WeightSpec], invariant: bool = False) -> list[WeightSpec]:
    return kept_on({"layers.0": listed}, "cuda", "bfloat16", invariant)["layers.0"]


def test_experts_of_integers_stay_in_codes() -> None:
    form = GroupedInt(4, 64)
    for spec in kept(specs(form, form)):
        assert spec.format == IntExperts(form)
        assert spec.nbytes("bfloat16") == spec.params // 64 * (32 + 4)  # codes of a group, and its scale word
    assert dequantized_experts({"layers.0": kept(specs(form, form), invariant=True)}) is None


@pytest.mark.parametrize("listed", [
    specs(GroupedInt(4, 64), GroupedInt(8, 64)),  # two different grouped products
    specs(GroupedInt(4, 64), GroupedInt(4, 64), inner=192),
    specs(GroupedInt(4, 64, ordered=True), GroupedInt(4, 64, ordered=True)),
    specs(GroupedInt(4, 48), GroupedInt(4, 48)),
])
@pytest.mark.parametrize("invariant", [False, True])
def test_what_has_no_grouped_product_is_dequantised(listed: list[WeightSpec], invariant: bool) -> None:
    found = kept(listed, invariant)
    for spec in found:
        base = getattr(spec.format, "base", None) if invariant else spec.format
        assert isinstance(base, Dequantized)
    assert isinstance(dequantized_experts({"layers.0": found}), GroupedInt)


def test_unquantised_experts_stay_as_they_are() -> None:
    listed = [replace(spec, format=DENSE) for spec in specs(GroupedInt(), GroupedInt())]
    assert kept(listed) == listed
