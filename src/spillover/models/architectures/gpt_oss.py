"""gpt-oss: attention sinks, a sliding window on every other layer, clamped experts with biases, kept in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillover.errors import CheckpointError
from spillover.kernels.formats.mxfp4 import GROUP
from spillover.models.config import ModelConfig, number, parse_config, parse_windows, require, section
from spillover.models.layers import MixtureDecoder, decoder_specs, experts, linears, tensor
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs

Model = MixtureDecoder


def config(hf: Mapping[str, Any]) -> ModelConfig:
    layers = require(hf, "num_hidden_layers")
    bias = bool(hf.get("attention_bias", True))
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    windows = parse_windows({"sliding_window": 128, **hf}, hf.get("layer_types") or alternating)
    mxfp4 = section(hf, "quantization_config").get("quant_method") == "mxfp4"
    parsed = parse_config(
        hf,
        theta=150_000.0,
        eps=1e-5,
        head_dim=64,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        windows=windows,
        num_experts=require(hf, "num_local_experts"),
        experts_per_token=require(hf, "num_experts_per_tok"),
        expert_intermediate_size=require(hf, "intermediate_size"),
        expert_format="mxfp4" if mxfp4 else "dense",
        swiglu_limit=number(hf, "swiglu_limit", 7.0),
    )
    if mxfp4 and (parsed.hidden_size % GROUP or parsed.expert_intermediate_size % GROUP):
        raise CheckpointError(f"config.json: mxfp4 experts need hidden and intermediate sizes in multiples of {GROUP}")
    return parsed


def weight_specs(config: ModelConfig) -> WeightSpecs:
    return decoder_specs(config, _mixture_specs)


def _mixture_specs(config: ModelConfig, layer: int) -> list[WeightSpec]:
    at = f"model.layers.{layer}.mlp."
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_intermediate_size
    return [
        *linears("router", (f"{at}router",), (count,), hidden, bias=True),
        *_expert_specs(config, "gate_up", f"{at}experts.gate_up_proj", (count, 2 * inner, hidden)),
        *_expert_specs(config, "down", f"{at}experts.down_proj", (count, hidden, inner)),
    ]


def _expert_specs(config: ModelConfig, name: str, source: str, shape: tuple[int, int, int]) -> list[WeightSpec]:
    """Return the specs of experts: dense files store [experts, in, out]; MXFP4 blocks are [experts, out, in]."""
    stored = Source((source,), (shape[1],), transposed=config.expert_format == "dense")
    return [experts(config, f"experts.{name}", shape, stored),
            tensor(f"experts.{name}_bias", f"{source}_bias", shape[:2])]
