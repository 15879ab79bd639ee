"""Qwen3 mixtures: Qwen3 attention, and experts on all layers except those that the configuration keeps dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.errors import CheckpointError, short_repr
from spillover.models.config import ModelConfig, expert_format, optional, parse_config, require
from spillover.models.layers import MixtureDecoder, decoder_specs, experts, matrix, mlp_specs
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs

Model = MixtureDecoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    layers = require(hf, "num_hidden_layers")
    bias = bool(hf.get("attention_bias", False))
    step, dense = optional(hf, "decoder_sparse_step", least=0) or 1, hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: 'mlp_only_layers' is {short_repr(dense)}, not a list")
    window = optional(hf, "sliding_window") if hf.get("use_sliding_window", False) else None
    return parse_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=(window,) * layers,
        num_experts=require(hf, "num_local_experts" if hf.get("num_local_experts") else "num_experts"),
        experts_per_token=require(hf, "num_experts_per_tok"),
        expert_intermediate_size=require(hf, "moe_intermediate_size"),
        expert_format=expert_format(hf),
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
    )


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, _mlp_specs)


def _mlp_specs(config: ModelConfig, layer: int) -> list[WeightSpec]:
    """Return the specs of a layer's MLP: files hold one tensor per expert, or stacks as newer HF modules do."""
    if layer in config.dense_layers:
        return mlp_specs(config, layer)
    at = f"model.layers.{layer}.mlp."
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_intermediate_size
    gate, up, down = (f"{at}experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return [
        matrix("router", (f"{at}gate.weight",), (count,), hidden),
        experts(config, "experts.gate_up", (count, 2 * inner, hidden), Source((gate, up), (inner, inner)),
                Source((f"{at}experts.gate_up_proj",), (2 * inner,))),
        experts(config, "experts.down", (count, hidden, inner), Source((down,), (hidden,)),
                Source((f"{at}experts.down_proj",), (hidden,))),
    ]
