"""Scales and rounding: codes are the nearest, scales the better ones, and calibration lowers the error it should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.kernels import native, quantize
from spillover.kernels.quantize import InputStats, gptq_round, int_scales, round_to_fp8, round_to_int

BITS = (4, 8)


def weights(rows: int = 24, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.05


def inputs(columns: int, count: int = 400) -> torch.Tensor:
    """Return inputs with some directions far larger than others, as in a model."""
    random = torch.Generator().manual_seed(2)
    mixed = torch.randn(columns, columns, generator=random) * torch.logspace(1, -2, columns)[:, None]
    return torch.randn(count, columns, generator=random) @ mixed


@pytest.mark.parametrize("bits", BITS)
def test_each_code_is_the_nearest_and_in_range(bits: int) -> None:
    weight = weights()
    made = round_to_int(weight, bits, 32, torch.bfloat16)
    assert made.scales.shape == (24, 3)
    assert made.scales.dtype == torch.bfloat16
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert low <= int(made.codes.min())
    assert int(made.codes.max()) <= high
    scales = made.scales.float().repeat_interleave(32, 1)
    values = torch.arange(low, high + 1)
    nearest = (weight.unsqueeze(-1) / scales.unsqueeze(-1) - values).abs().argmin(-1) + low
    assert torch.equal(nearest, made.codes.long())


@pytest.mark.parametrize("bits", BITS)
def test_scales_are_no_worse_than_those_that_clip_nothing(bits: int) -> None:
    weight = weights()
    top = 2 ** (bits - 1) - 1
    plain = (weight.view(24, 3, 32).abs().amax(-1) / top).bfloat16().float().repeat_interleave(32, 1)
    rounded = (weight / plain).round().clamp(-top - 1, top) * plain
    made = round_to_int(weight, bits, 32, torch.bfloat16)
    found = made.codes.float() * made.scales.float().repeat_interleave(32, 1)
    error, groups = (((each - weight).square().view(24, 3, 32).sum(-1)) for each in (found, rounded))
    assert (error <= groups * (1 + 1e-5)).all()
    if bits == 4:
        assert error.sum() < 0.9 * groups.sum()


def test_columns_that_count_more_have_less_error() -> None:
    weight, importance = weights(), torch.ones(96)
    importance[::8] = 100

    def error(scales: torch.Tensor) -> float:
        wide = scales.float().repeat_interleave(32, 1)
        return float((((weight / wide).round().clamp(-8, 7) * wide - weight).square() * importance).sum())

    assert error(int_scales(weight, 4, 32, torch.float32, importance)) < error(int_scales(weight, 4, 32, torch.float32))


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
@settings(deadline=None, max_examples=60)
@given(bits=st.sampled_from(BITS), group=st.sampled_from([32, 64, 128]), rows=st.integers(1, 40),
       seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
       counted=st.booleans(), size=st.sampled_from([1e-6, 0.05, 30.0]))
def test_native_scales_have_the_error_of_torch(bits: int, group: int, rows: int, seed: int, dtype: torch.dtype,
                                               counted: bool, size: float) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 384, generator=random) * size
    weight[:, :group] *= seed % 2  # a group of zeros, every second time
    importance = torch.rand(384, generator=random) if counted else None
    found = int_scales(weight, bits, group, dtype, importance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize.native, "library", lambda: None)
        expected = int_scales(weight, bits, group, dtype, importance)

    def errors(scales: torch.Tensor) -> torch.Tensor:
        wide = scales.double().repeat_interleave(group, 1)
        made = (weight / wide.float()).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * wide
        wrong = (made - weight).square() * (1 if importance is None else importance)
        return wrong.view(rows, -1, group).sum(-1)

    assert found.dtype == dtype
    assert (errors(found) <= errors(expected) * (1 + 1e-4) + 1e-30).all()
    assert (found == expected).float().mean() > 0.95, "others only where two have nearly the same error"


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight = torch.randn(300, 4096, generator=torch.Generator().manual_seed(3))  # several pieces of rows
    whole = round_to_int(weight, 4, 128, torch.bfloat16)
    alone = round_to_int(weight[211:212], 4, 128, torch.bfloat16)
    assert torch.equal(whole.codes[211:212], alone.codes)
    assert torch.equal(whole.scales[211:212], alone.scales)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros(bits: int) -> None:
    weight = weights()
    weight[3] = 0
    for dtype in (torch.bfloat16, torch.float16):
        for made in (round_to_int(weight, bits, 32, dtype), round_to_fp8(weight, dtype)):
            found = made.dequantize(torch.float32)
            assert not found[3].any()
            assert found.isfinite().all()


def test_fp8_takes_the_nearest_value_of_its_row() -> None:
    weight = weights()
    weight[5] *= 1e4
    made = round_to_fp8(weight, torch.float32)
    assert made.scales.shape == (24, 1)
    assert torch.equal(made.codes.float().abs().amax(1), torch.full((24,), 448.0))
    assert ((made.dequantize(torch.float32) - weight).abs() <= weight.abs() / 16 + made.scales / 512).all()


def test_the_factor_is_that_of_the_inverse() -> None:
    x = inputs(48).double()
    total = x.T @ x
    known = InputStats.of(total)
    factor, order = known.factor.double(), known.order
    damped = (total + 0.01 * total.diagonal().mean() * torch.eye(48, dtype=torch.float64))[order][:, order]
    assert torch.equal(total.diagonal().sort(descending=True).values, total.diagonal()[order])
    assert torch.equal(factor, factor.triu())
    inverse = damped.inverse()
    assert torch.allclose(factor.T @ factor, inverse, rtol=1e-4, atol=1e-6 * float(inverse.abs().max()))


@pytest.mark.parametrize("group", [32, 96, 48])
def test_calibrated_outputs_are_nearer(group: int) -> None:
    weight, x = weights(), inputs(96)
    known = InputStats.of(x.T @ x)

    def error(made: torch.Tensor) -> float:
        return float((x @ (made - weight).T).square().mean())

    plain = error(round_to_int(weight, 4, group, torch.float32).dequantize(torch.float32))
    assert error(gptq_round(weight, known, 4, group, torch.float32).dequantize(torch.float32)) < 0.3 * plain


def test_inputs_never_seen_leave_plain_rounding() -> None:
    weight = weights()
    known = InputStats.of(torch.zeros(96, 96))
    found, plain = gptq_round(weight, known, 4, 32, torch.bfloat16), round_to_int(weight, 4, 32, torch.bfloat16)
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scales, plain.scales)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
@settings(deadline=None, max_examples=60)
@given(bits=st.sampled_from(BITS), group=st.sampled_from([8, 24, 32, 64, 128]), groups=st.integers(1, 12),
       rows=st.integers(1, 40), seed=st.integers(0, 99), size=st.sampled_from([1e-6, 0.05, 30.0]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_native_columns_have_the_bits_of_torch(bits: int, group: int, groups: int, rows: int, seed: int, size: float,
                                               dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(seed)
    columns = group * groups
    weight = torch.randn(rows, columns, generator=random) * size
    weight[:, :group] *= seed % 2  # a group of zeros, every second time
    x = inputs(columns)
    known = InputStats.of(x.T @ x)
    scales = int_scales(weight, bits, group, dtype, known.importance)
    before = weight.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "int_scales", lambda *_: scales)  # the two searches for scales may differ
        found = gptq_round(weight, known, bits, group, dtype)
        patch.setattr(quantize.native, "library", lambda: None)
        expected = gptq_round(weight, known, bits, group, dtype)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(weight, before)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
def test_native_columns_leave_the_errors_of_torch() -> None:
    weight, x = weights(columns=192), inputs(192)
    known = InputStats.of(x.T @ x)
    scales, states = int_scales(weight, 4, 32, torch.float32), []
    for library in (native.library, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantize.native, "library", library)
            remaining, codes = weight.index_select(1, known.order), torch.zeros(weight.shape, dtype=torch.int8)
            errors = quantize._round_columns(remaining, known.factor.contiguous(), scales, known.order, 64, 192, 4,
                                             codes)
            states.append((errors, remaining, codes))
    assert all(torch.equal(found, expected) for found, expected in zip(*states, strict=True))
    assert states[0][2].any()
