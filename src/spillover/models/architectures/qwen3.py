"""Qwen3: Qwen2 with a norm on every query and key head in place of the biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.models.architectures.qwen2 import windows
from spillover.models.config import ModelConfig, parse_config
from spillover.models.layers import Decoder, decoder_specs, mlp_specs
from spillover.models.weight_specs import WeightSpecs

Model = Decoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return parse_config(hf, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows(hf))


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, mlp_specs)
