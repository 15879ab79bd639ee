"""The shape of a model, whatever file it came from. Parsed once, never mutated; knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spillover.errors import CheckpointError

FP8_BLOCK = 128  # as kernels.fp8.BLOCK
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """Only the fields of its kind are read."""

    kind: str  # "linear" | "llama3" | "yarn"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 * ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # as in config.json's "architectures", e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()  # one a layer; None: full attention
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()  # layers without experts in a mixture model
    expert_format: str = "dense"  # "dense" | "fp8" | "mxfp4"
    swiglu_limit: float | None = None
    dtype: str = "float32"  # as stored
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        assert len(self.windows) == self.num_layers
        assert self.num_heads % self.num_kv_heads == 0

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


def parse_config(
    hf: Mapping[str, Any],
    *,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    head_dim: int | None = None,
    **fields: Any,
) -> ModelConfig:
    """What every architecture shares, from a config.json; `fields` are the architecture's own.

    `theta`, `eps` and `head_dim` are the architecture's defaults for a file that leaves them out.
    """
    architecture = str((hf.get("architectures") or ["the model"])[0])
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act '{activation}' is not supported by {architecture}, only 'silu'")
    _check_quantization(hf, fields.get("expert_format", "dense"))
    heads = require(hf, "num_attention_heads")
    hidden = require(hf, "hidden_size")
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    rope_theta, rope_scaling = parse_rope(hf, theta)
    # The first is what a checkpoint adds from generation_config.json, where chat models list their turn ends.
    eos = hf.get("generation_eos_token_id", hf.get("eos_token_id"))
    parsed: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": require(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hf.get("head_dim") or head_dim or hidden // heads,
        "intermediate_size": require(hf, "intermediate_size"),
        "rms_norm_eps": float(hf.get("rms_norm_eps", eps)),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position": require(hf, "max_position_embeddings"),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
    }
    return ModelConfig(**(parsed | fields))


def require(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json: '{key}' is missing or not a whole number (found {value!r})")
    return value


def parse_rope(hf: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (new files) or `rope_theta` and `rope_scaling` (older ones)."""
    rope: Mapping[str, Any] = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, Mapping)]
    if per_layer_type:
        if any(one != per_layer_type[0] for one in per_layer_type):
            raise CheckpointError("config.json: rope_parameters that differ between layer types are not supported")
        rope = per_layer_type[0]
    base = float(rope.get("rope_theta") or hf.get("rope_theta") or theta)
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"config.json: rope type '{kind}' is not supported, only {', '.join(ROPE_KINDS)}")
    max_position = require(hf, "max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
    original = original or max_position
    factor = rope.get("factor") or max_position / original
    scaling = RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_position=int(original),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(rope, factor),
        truncate=bool(rope.get("truncate", True)),
    )
    return base, scaling


def expert_format(hf: Mapping[str, Any]) -> str:
    """The form experts are kept in: as stored where that is FP8, else the engine's type."""
    return "fp8" if (hf.get("quantization_config") or {}).get("quant_method") == "fp8" else "dense"


def parse_windows(hf: Mapping[str, Any], layer_types: Sequence[str]) -> tuple[int | None, ...]:
    """One window a layer, from its type."""
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"config.json: layer type '{unknown[0]}' is not supported, only full_attention and sliding_attention"
        )
    if len(layer_types) != require(hf, "num_hidden_layers"):
        raise CheckpointError(f"config.json: layer_types has {len(layer_types)} entries, not one a layer")
    if "sliding_attention" not in layer_types:
        return (None,) * len(layer_types)
    window = require(hf, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim and factor > 1:
        growth = 0.1 * math.log(factor)
        return float((growth * mscale + 1) / (growth * mscale_all_dim + 1))
    return None


def _check_quantization(hf: Mapping[str, Any], expert_format: str) -> None:
    quantization = hf.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method == "fp8":
        size = quantization.get("weight_block_size")
        if size is None or list(size) != [FP8_BLOCK, FP8_BLOCK] or quantization.get("fmt", "e4m3") != "e4m3":
            raise CheckpointError(
                f"config.json: fp8 weights are supported in e4m3 with a scale for every block of {FP8_BLOCK} x "
                f"{FP8_BLOCK}, not with weight_block_size {size}; use the unquantised model or a GGUF file"
            )
    elif method is not None and method != expert_format:
        raise CheckpointError(
            f"config.json: weights quantised with '{method}' are not supported here; "
            "use the unquantised model, block-scaled fp8, a GGUF file, or gpt-oss in mxfp4"
        )
