"""The configuration of a model, independent of its file format. Parsed once and never mutated; has no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spillover.errors import CheckpointError, short_repr

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MOST = 2**31 - 1  # maximum of sizes in a file
MOST_NUMBER = 1e18
MOST_LAYERS, MOST_EXPERTS = 10_000, 65_536
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt")  # quantisations supported for all architectures
_LIMITS = {"num_hidden_layers": MOST_LAYERS, "num_local_experts": MOST_EXPERTS, "num_experts": MOST_EXPERTS}


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary embeddings; only the fields of its kind are used."""

    kind: str  # "linear" | "llama3" | "yarn"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    beta_fast: float = 32.0  # yarn only
    beta_slow: float = 1.0  # yarn only
    attention_factor: float | None = None  # yarn; None: 0.1 * ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # class name from config.json's "architectures", e.g. "LlamaForCausalLM"
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
    windows: tuple[int | None, ...] = ()  # window of each layer in tokens; None: full attention
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()  # layers of a mixture model that have no experts
    expert_format: str = "dense"  # quant_method of the experts' weight format
    quantization: Mapping[str, Any] = field(default_factory=dict)  # config.json's quantization_config
    swiglu_limit: float | None = None
    dtype: str = "float32"  # type of the weights in the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # Layers of a draft head, whose KV is stored in the model's blocks; not part of the model's identity.
    head_layers: int = field(default=0, repr=False)

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
    """Parse the settings that all architectures share from a config.json; `fields`: those of the architecture.

    `theta`, `eps` and `head_dim` are the architecture's defaults for files that omit them.
    """
    architecture = str((hf.get("architectures") or ["the model"])[0])
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act {short_repr(activation)} is not supported by {architecture}, "
                              "only 'silu'")
    quantization = section(hf, "quantization_config")
    if quantization:  # a format may store its scales in the model's type
        quantization = {**quantization, "dtype": _dtype(hf).removeprefix("torch.")}
    _check_quantization(quantization, fields.get("expert_format", "dense"))
    heads = require(hf, "num_attention_heads")
    hidden = require(hf, "hidden_size")
    kv_heads = optional(hf, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads {heads} is no multiple of {kv_heads} key/value heads")
    size = optional(hf, "head_dim") or head_dim or hidden // heads
    if size < 2 or size % 2:
        raise CheckpointError(f"config.json: head_dim {size} is not supported; it must be an even number for rope")
    rope_theta, rope_scaling = parse_rope(hf, theta)
    # The former key is added by checkpoints from generation_config.json, where chat models list end-of-turn tokens.
    eos = hf.get("generation_eos_token_id", hf.get("eos_token_id"))
    parsed: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": require(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": require(hf, "intermediate_size"),
        "rms_norm_eps": number(hf, "rms_norm_eps", eps),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position": require(hf, "max_position_embeddings"),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": _dtype(hf).removeprefix("torch."),
        "quantization": quantization,
        "bos_token_id": next(iter(token_ids(hf.get("bos_token_id"), "bos_token_id")), None),
        "eos_token_ids": token_ids(eos, "eos_token_id"),
    }
    parsed |= fields
    if parsed.get("experts_per_token", 0) > parsed.get("num_experts", 0):
        raise CheckpointError(f"config.json: num_experts_per_tok {parsed['experts_per_token']} exceeds the "
                              f"{parsed['num_experts']} experts that there are")
    return ModelConfig(**parsed)


def require(hf: Mapping[str, Any], key: str) -> int:
    value = optional(hf, key)
    if value is None:
        raise CheckpointError(f"config.json: '{key}' is missing or not a whole number (found None)")
    return value


def optional(hf: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    """Return a whole number from `least` to the key's maximum; None if the file does not have it."""
    value, most = hf.get(key), _LIMITS.get(key, MOST)
    if value is None:
        return None
    if type(value) is not int:
        raise CheckpointError(f"config.json: '{key}' is missing or not a whole number (found {short_repr(value)})")
    if not least <= value <= most:
        raise CheckpointError(f"config.json: '{key}' is {short_repr(value)}; it can be {least} to {most:,}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive finite number; the default if it is missing or 0."""
    value = hf.get(key) or default
    if type(value) not in (int, float) or not 0 < value <= MOST_NUMBER:
        raise CheckpointError(f"config.json: '{key}' is {short_repr(value)}, not a positive number")
    return float(value)


def section(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: '{key}' is {short_repr(value)}, not an object")
    return value


def token_ids(value: object, key: str, file: object = "config.json") -> tuple[int, ...]:
    """Return token ids from a value that is one id, a list of ids, or None."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for index in ids:
        if type(index) is not int or not 0 <= index <= MOST:
            raise CheckpointError(f"{file}: '{key}' has {short_repr(index)}, which is not a token id")
    return ids


def named(name: str) -> str:
    """Return a tensor's name for an error message: as it is, or its repr if it is long or not printable."""
    return name if name.isprintable() and 0 < len(name) <= 120 else short_repr(name)


def parse_rope(hf: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """Parse rope base and scaling from `rope_parameters` (new files) or `rope_theta` and `rope_scaling` (old files)."""
    rope = section(hf, "rope_scaling") or section(hf, "rope_parameters")
    per_layer_type = [value for value in rope.values() if isinstance(value, Mapping)]
    if per_layer_type:
        if any(one != per_layer_type[0] for one in per_layer_type):
            raise CheckpointError("config.json: rope_parameters that differ between layer types are not supported")
        rope = per_layer_type[0]
    base = number(rope, "rope_theta", number(hf, "rope_theta", theta))
    partial = number(rope, "partial_rotary_factor", number(hf, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"config.json: rope type {short_repr(kind)} is not supported, only "
                              f"{', '.join(ROPE_KINDS)}")
    max_position = require(hf, "max_position_embeddings")
    key = "original_max_position_embeddings"
    original = optional(rope, key) or optional(hf, key) or max_position
    factor = number(rope, "factor", max_position / original)
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=number(rope, "low_freq_factor", 1.0),
        high_freq_factor=number(rope, "high_freq_factor", 4.0),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        attention_factor=_attention_factor(rope, factor),
        truncate=bool(rope.get("truncate", True)),
    )
    if scaling.low_freq_factor == scaling.high_freq_factor:
        raise CheckpointError("config.json: low_freq_factor and high_freq_factor of the rope are equal")
    return base, scaling


def expert_format(hf: Mapping[str, Any]) -> str:
    """Return the quant_method of the experts' format, which is that of all linears."""
    from spillover.kernels.formats.base import registered  # imported here, as reading a config does not need torch

    found = registered(section(hf, "quantization_config").get("quant_method"))
    return "dense" if found is None or found.experts_only else found.quant_method


def parse_windows(hf: Mapping[str, Any], layer_types: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer, from the layers' types."""
    if not isinstance(layer_types, list):
        raise CheckpointError(f"config.json: 'layer_types' is {short_repr(layer_types)}, not a list")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(f"config.json: layer type {short_repr(kind)} is not supported, only full_attention "
                                  "and sliding_attention")
    if len(layer_types) != require(hf, "num_hidden_layers"):
        raise CheckpointError(f"config.json: layer_types has {len(layer_types)} entries, not one per layer")
    if "sliding_attention" not in layer_types:
        return (None,) * len(layer_types)
    window = require(hf, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(hf: Mapping[str, Any]) -> str:
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise CheckpointError(f"config.json: 'dtype' is {short_repr(dtype)}, not a name such as 'bfloat16'")
    return dtype


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor", 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim") and factor > 1:
        growth = 0.1 * math.log(factor)
        return (growth * number(rope, "mscale", 1.0) + 1) / (growth * number(rope, "mscale_all_dim", 1.0) + 1)
    return None


def _check_quantization(quantization: Mapping[str, Any], expert_format: str) -> None:
    from spillover.kernels.formats.base import registered

    if not quantization:
        return
    method = quantization.get("quant_method", "unknown")
    found = registered(method)
    if found is not None:
        found.from_config(quantization)
    if found is None or (found.experts_only and method != expert_format):
        raise CheckpointError(
            f"config.json: weights quantised with {short_repr(method)} are not supported here; "
            f"supported are {', '.join(METHODS)}, a GGUF file, and gpt-oss in mxfp4"
        )
