"""Llama 2 and 3, TinyLlama, SmolLM2 and others that share the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.models.config import ModelConfig, parse_config
from spillover.models.layers import Decoder, decoder_specs, mlp_specs
from spillover.models.weight_specs import WeightSpecs

Model = Decoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return parse_config(hf, qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, mlp_specs)
