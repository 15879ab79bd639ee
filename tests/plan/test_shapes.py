"""Bytes and parameters against counts made by hand."""

from __future__ import annotations

import pytest

from spillover.kernels.fields import LinearShape
from spillover.models.weight_specs import reformatted
from spillover.plan.shapes import model_shape
from support.plan_shapes import GPT_OSS, GPT_OSS_SPECS, MIXTURE, MIXTURE_SPECS, SMOLLM2, SMOLLM2_SPECS, TINY, TINY_SPECS


def test_smollm2_is_538_megabytes_with_its_tied_embedding_once() -> None:
    shape = model_shape(SMOLLM2, SMOLLM2_SPECS, "float32")
    assert shape.weight_bytes == 4 * 134_515_008
    assert dict(shape.weights)["embedding"] == 4 * 49152 * 576
    assert shape.kv_token_bytes == 30 * 2 * 3 * 64 * 4
    assert shape.block_bytes(16) == 16 * shape.kv_token_bytes
    # A tied head is read for logits although it is stored only once.
    assert shape.head_params == 49152 * 576
    assert shape.layer_bytes + shape.head_bytes == shape.weight_bytes


def test_a_small_model_by_hand() -> None:
    shape = model_shape(TINY, TINY_SPECS, "float32")
    attention = (8 + 4 + 4) * 8 + 8 * 8
    mlp = 3 * 16 * 8
    assert shape.layer_params == 2 * (attention + mlp)
    assert shape.layer_bytes == 2 * 4 * (attention + mlp + 2 * 8)
    assert shape.head_params == 100 * 8
    assert shape.head_bytes == 4 * (100 * 8 + 8)
    assert dict(shape.weights) == {
        "embedding": 4 * 800, "attention": 8 * attention, "mlp": 8 * mlp, "norms": 4 * 5 * 8, "head": 4 * 800,
    }
    assert model_shape(TINY, TINY_SPECS, "bfloat16").weight_bytes * 2 == shape.weight_bytes


def test_packed_rows_are_padded() -> None:
    panels = reformatted(TINY_SPECS, lambda weight: weight.packed(32, LinearShape((96,), 64)))
    plain, packed = model_shape(TINY, TINY_SPECS, "float32"), model_shape(TINY, panels, "float32")
    assert dict(packed.weights)["head"] == 4 * 128 * 8
    assert dict(packed.weights)["embedding"] == dict(plain.weights)["embedding"]  # used for lookups, so not packed


def test_a_mixture_counts_one_expert_at_a_time() -> None:
    shape = model_shape(MIXTURE, MIXTURE_SPECS, "float32")
    assert shape.expert_layers == 2
    assert shape.expert_params == 3 * 4 * 8
    assert shape.expert_bytes == 4 * shape.expert_params
    assert dict(shape.weights)["experts"] == 2 * 8 * shape.expert_bytes
    assert shape.distinct_experts(1) == pytest.approx(2)
    assert shape.distinct_experts(2) == pytest.approx(2 + 2 * 6 / 8)
    assert 7.9 < shape.distinct_experts(100) <= 8


def test_mxfp4_experts_stay_as_stored() -> None:
    shape = model_shape(GPT_OSS, GPT_OSS_SPECS, "bfloat16")
    params = 3 * 2880 * 2880
    assert shape.expert_params == params
    # Half a byte per value, 90 scales per row padded to 92, biases in the compute type.
    assert shape.expert_bytes == params // 2 + 3 * 2880 * 92 + 2 * (2 * 2880 + 2880)


def test_windows_make_groups_of_equal_size() -> None:
    shape = model_shape(GPT_OSS, GPT_OSS_SPECS, "bfloat16")
    assert shape.group_windows == (None, 128)
    assert shape.group_layers == 2
    assert shape.block_bytes(16) == 2 * 2 * 8 * 64 * 2 * 16
