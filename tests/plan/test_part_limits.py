"""The limits of a step's parts add up to those of the step."""

from __future__ import annotations

import pytest

from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs
from spillover.plan.part_limits import PartLimits
from spillover.plan.roofline import step_limit
from spillover.plan.shapes import model_shape
from support.plan_shapes import GPT_OSS, GPT_OSS_SPECS, SMOLLM2, SMOLLM2_SPECS, TINY, TINY_SPECS


@pytest.mark.parametrize(("config", "specs"), [(SMOLLM2, SMOLLM2_SPECS), (GPT_OSS, GPT_OSS_SPECS)])
@pytest.mark.parametrize("batch", [[(1, 7), (1, 300)], [(400, 0)], [(5, 200), (1, 3)]])
def test_parts_compute_what_the_step_computes(config: ModelConfig, specs: WeightSpecs,
                                              batch: list[tuple[int, int]]) -> None:
    parts = PartLimits(config, specs, "bfloat16").step(batch)
    whole = step_limit(model_shape(config, specs, "bfloat16"), batch)
    assert sum(part.flops for part in parts.values()) == pytest.approx(whole.flops)
    assert ("experts" in parts, "gate_up" in parts) == (config.is_moe, not config.is_moe)


def test_parts_of_a_small_model_by_hand() -> None:
    parts = PartLimits(TINY, TINY_SPECS, "float32").step([(3, 5), (1, 2)])
    kv = 2 * 2 * 2 * 4  # one token in one of two layers: k and v, 2 heads of 2 numbers
    assert parts["qkv"].bytes == 2 * 4 * (16 * 8 + 4 * (8 + 16))
    assert parts["gate_up"].bytes == 2 * 4 * (32 * 8 + 4 * (8 + 16))
    assert parts["attention"].bytes == 2 * (kv * (3 + 5 + 1 + 2) + 2 * 4 * 8 * 4)
    assert parts["norms"].bytes == 5 * 4 * 4 * 8 * 4
    assert parts["rope and KV store"].bytes == 2 * 4 * ((2 * (4 + 2) + 2) * 2 * 4 + kv)
    assert parts["head"].bytes == 4 * (800 + 8) + 2 * 108 * 4
    assert parts["sampling"].bytes == 2 * 100 * 4
