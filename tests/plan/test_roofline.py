"""The limit of a step against counts made by hand, and against itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.plan.rates import Rates
from spillover.plan.roofline import Roofline, keys_seen, step_limit
from spillover.plan.shapes import model_shape
from support.plan_shapes import (
    GPT_OSS,
    GPT_OSS_SPECS,
    MIXTURE,
    MIXTURE_SPECS,
    RATES,
    SMOLLM2,
    SMOLLM2_SPECS,
    TINY,
    TINY_SPECS,
)

SHAPE = model_shape(SMOLLM2, SMOLLM2_SPECS, "float32")
TINY_SHAPE = model_shape(TINY, TINY_SPECS, "float32")


def test_a_step_of_a_small_model_by_hand() -> None:
    limit = step_limit(TINY_SHAPE, [(3, 5), (1, 2)])
    layer = (8 + 4 + 4) * 8 + 8 * 8 + 3 * 16 * 8
    kv = 2 * 2 * 2 * 4  # one token in one layer: k and v, 2 heads of 2 numbers
    weights = 2 * 4 * (layer + 16) + 4 * (800 + 8)
    assert limit.bytes == weights + 4 * 8 * 4 + 2 * 100 * 4 + 2 * kv * (5 + 2) + 2 * kv * 4
    keys = (6 + 7 + 8) + 3
    assert limit.flops == 2 * 2 * layer * 4 + 2 * 800 * 2 + 2 * 4 * 4 * 2 * keys


def test_decode_of_smollm2_is_bound_by_memory_and_prefill_by_compute() -> None:
    roofline = Roofline(SHAPE, RATES)
    decode = roofline.decode(1, 0)
    assert decode.bound == "memory"
    assert decode.seconds == pytest.approx(538e6 / 25e9, rel=0.01)
    assert decode.percent(2 * decode.seconds) == pytest.approx(50)
    prefill = roofline.prefill(512)
    assert prefill.bound == "compute"
    assert prefill.limit.flops == pytest.approx(2 * 106.2e6 * 512, rel=0.2)
    assert prefill.tokens_per_second == pytest.approx(512 / prefill.seconds)


def test_a_batch_reads_the_weights_once() -> None:
    roofline = Roofline(SHAPE, RATES)
    one, many = roofline.decode(1, 100), roofline.decode(16, 100)
    assert many.limit.bytes < 2 * one.limit.bytes
    assert many.limit.flops == pytest.approx(16 * one.limit.flops)
    assert many.tokens == 16


def test_a_mixture_reads_the_experts_it_touches() -> None:
    shape = model_shape(MIXTURE, MIXTURE_SPECS, "float32")
    one, two = (step_limit(shape, [(1, 0)] * rows).bytes for rows in (1, 2))
    row = 8 * 4 + 100 * 4 + shape.kv_token_bytes
    assert two - one - row == pytest.approx(2 * 1.5 * shape.expert_bytes)
    assert step_limit(shape, [(5, 0)]).flops - step_limit(shape, [(4, 0)]).flops == (
        2 * (shape.layer_params + 2 * 2 * shape.expert_params) + 2 * 4 * 4 * 2 * 5
    )


def test_a_window_bounds_what_is_read() -> None:
    shape = model_shape(GPT_OSS, GPT_OSS_SPECS, "bfloat16")
    grown = step_limit(shape, [(1, 3000)]).bytes - step_limit(shape, [(1, 2000)]).bytes
    assert grown == 1000 * 2 * shape.kv_layer_bytes  # only the two layers with full attention


@given(st.integers(1, 40), st.integers(0, 60), st.none() | st.integers(1, 50))
def test_keys_seen_is_the_sum_over_tokens(new: int, context: int, window: int | None) -> None:
    seen = (context + i + 1 for i in range(new))
    assert keys_seen(new, context, window) == sum(n if window is None else min(n, window) for n in seen)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 512)), min_size=1, max_size=8))
def test_one_step_costs_no_more_than_its_parts(batch: list[tuple[int, int]]) -> None:
    roofline = Roofline(SHAPE, RATES)
    whole = roofline.step(batch)
    assert whole.seconds <= sum(roofline.step([part]).seconds for part in batch) * (1 + 1e-9)
    assert whole.seconds == max(whole.limit.bytes / 25e9, whole.limit.flops / 250e9)


def test_a_generation_is_its_prefill_and_its_decodes() -> None:
    roofline = Roofline(TINY_SHAPE, RATES)
    whole = roofline.generate(batch=2, prompt=8, output=3)
    parts = [roofline.step([(8, 0)] * 2), roofline.decode(2, 8), roofline.decode(2, 9)]
    assert whole.seconds == pytest.approx(sum(part.seconds for part in parts))
    assert whole.limit.bytes == pytest.approx(sum(part.limit.bytes for part in parts))
    assert whole.tokens == 6


def test_sixteen_bit_products_have_their_own_roof() -> None:
    rates = Rates(device="cuda", memory_read=4e12, float32=50e12, bfloat16=750e12)
    assert rates.flops("bfloat16") == rates.flops("float16") == 750e12
    assert rates.flops("float32") == 50e12
    assert RATES.flops("bfloat16") == 250e9
