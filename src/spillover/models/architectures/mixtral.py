"""Mixtral: Mistral with a mixture of experts as every MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.kernels.formats.dense import DENSE
from spillover.models.config import ModelConfig, expert_format, optional, parse_config, require
from spillover.models.layers import MixtureDecoder, decoder_specs, experts
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs

Model = MixtureDecoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    return parse_config(
        hf,
        theta=1_000_000.0,
        eps=1e-5,
        windows=(optional(hf, "sliding_window"),) * require(hf, "num_hidden_layers"),
        num_experts=require(hf, "num_local_experts"),
        experts_per_token=require(hf, "num_experts_per_tok"),
        expert_intermediate_size=require(hf, "intermediate_size"),
        expert_format=expert_format(hf),
    )


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, _mixture_specs)


def _mixture_specs(config: ModelConfig, layer: int) -> list[WeightSpec]:
    """Return the specs of router and experts: files hold one tensor per expert, or stacks as newer HF modules do."""
    old, new = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_intermediate_size
    router = tuple(Source((f"{at}gate.weight",), (count,)) for at in (old, new))
    w1, w2, w3 = (f"{old}experts.{{expert}}.{name}.weight" for name in ("w1", "w2", "w3"))
    return [
        WeightSpec("router", (count, hidden), router, DENSE),
        experts(config, "experts.gate_up", (count, 2 * inner, hidden), Source((w1, w3), (inner, inner)),
                Source((f"{new}experts.gate_up_proj",), (2 * inner,))),
        experts(config, "experts.down", (count, hidden, inner), Source((w2,), (hidden,)),
                Source((f"{new}experts.down_proj",), (hidden,))),
    ]
