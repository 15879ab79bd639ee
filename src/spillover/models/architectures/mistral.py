"""Mistral: Llama with a sliding window on every layer, or on none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.models.config import ModelConfig, optional, parse_config, require
from spillover.models.layers import Decoder, decoder_specs, mlp_specs
from spillover.models.weight_specs import WeightSpecs

Model = Decoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    window = optional({"sliding_window": 4096, **hf}, "sliding_window")  # only an explicit null turns it off
    return parse_config(hf, windows=(window,) * require(hf, "num_hidden_layers"))


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, mlp_specs)
