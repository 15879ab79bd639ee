"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally a sliding window on the last layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.models.config import ModelConfig, optional, parse_config, parse_windows, require
from spillover.models.layers import Decoder, decoder_specs, mlp_specs
from spillover.models.weight_specs import WeightSpecs

Model = Decoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    return parse_config(hf, qkv_bias=True, windows=windows(hf))


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, mlp_specs)


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer: by `layer_types`, or else a sliding window from layer `max_window_layers` on."""
    layers = require(hf, "num_hidden_layers")
    if not hf.get("use_sliding_window", False) or hf.get("sliding_window") is None:
        return (None,) * layers
    first = optional(hf, "max_window_layers", least=0)
    first = 28 if first is None else first
    types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return parse_windows(hf, hf.get("layer_types") or types)
