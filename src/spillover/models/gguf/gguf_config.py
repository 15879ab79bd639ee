"""Conversion of a GGUF file's metadata to the keys and conventions of Hugging Face's config.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType

from spillover.errors import CheckpointError, short_repr
from spillover.models.config import MOST, MOST_EXPERTS, MOST_LAYERS, MOST_NUMBER
from spillover.models.gguf.gguf_header import GGUFHeader

# GGUF's "general.architecture" to HF's class and model type. Mistral files say llama, as do Mixtral's, with experts.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
# Control tokens that always end a generation, even if the metadata does not list them, as in llama.cpp.
END_TOKENS = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>",
              "<end_of_turn>"}
CONTROL = 3  # value of tokenizer.ggml.token_type for control tokens
_DTYPES = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}


def is_mixtral(header: GGUFHeader) -> bool:
    count = header.metadata.get("llama.expert_count", 0)
    return header.metadata.get("general.architecture") == "llama" and isinstance(count, int) and count > 0


def experts_are_mxfp4(header: GGUFHeader) -> bool:
    tensor = header.tensors.get("blk.0.ffn_down_exps.weight")
    return tensor is not None and tensor.kind == GGMLQuantizationType.MXFP4


def end_token_ids(metadata: dict[str, Any], path: Path) -> list[int]:
    """Return the end-of-sequence id first, then every other id that ends a generation."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    for index in ids:
        if type(index) is not int or not 0 <= index <= MOST:
            raise CheckpointError(f"{path}: {short_repr(index)} among its end-of-sequence ids is not a token id")
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return list(dict.fromkeys(ids))
    ids += [index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind == CONTROL and isinstance(token, str) and token in END_TOKENS]
    return list(dict.fromkeys(ids))


def hf_config(header: GGUFHeader, path: Path, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """Return the equivalent config.json. `rope_factors`: rope_freqs.weight, which encodes Llama 3's rope scaling."""
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise CheckpointError(f"{path} holds the architecture {short_repr(arch)}, which is not supported; supported "
                              f"are {', '.join(ARCHITECTURES)}")

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{path} lacks the metadata field {arch}.{key}")
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise CheckpointError(f"{path}: {arch}.{key} differs from layer to layer, which is not supported")
            value = value[0]
        return value

    def count(key: str, default: int | None = None, most: int = MOST) -> int:
        value = field(key, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: {arch}.{key} is {short_repr(value)}, and not a positive whole number")
        if value > most:
            raise CheckpointError(f"{path}: {arch}.{key} is {value:,}; it can be at most {most:,}")
        return value

    def experts() -> int:
        return count("expert_count", most=MOST_EXPERTS)

    def number(key: str, default: float | None = None) -> float:
        value = field(key, default)
        if not isinstance(value, int | float) or not 0 < value <= MOST_NUMBER:
            raise CheckpointError(f"{path}: {arch}.{key} is {short_repr(value)}, and not a positive number")
        return value

    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{path} has no tensor token_embd.weight")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    rotary_dim = count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise CheckpointError(f"{path} rotates {rotary_dim} of {head_dim} dimensions of a head, which is not supported")
    class_name, model_type = ARCHITECTURES[arch]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": count("block_count", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": field("feed_forward_length", 0),  # replaced below for architectures that require it
        "hidden_act": "silu",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, arch, path, rope_factors, head_dim),
        "max_position_embeddings": count("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "dtype": _dtype(header),
    }
    if is_mixtral(header):
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None,
                   "num_local_experts": experts(), "num_experts_per_tok": count("expert_used_count")}
    elif arch == "qwen3moe":
        config |= {"num_experts": experts(), "num_experts_per_tok": count("expert_used_count"),
                   "moe_intermediate_size": count("expert_feed_forward_length"), "norm_topk_prob": True,
                   "decoder_sparse_step": 1, "mlp_only_layers": []}
    elif arch == "gpt-oss":
        layers = config["num_hidden_layers"]
        config |= {"intermediate_size": count("expert_feed_forward_length", config["intermediate_size"] or None),
                   "num_local_experts": experts(), "num_experts_per_tok": count("expert_used_count"),
                   "sliding_window": count("attention.sliding_window", 128), "swiglu_limit": 7.0,
                   "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]}
        if experts_are_mxfp4(header):
            config["quantization_config"] = {"quant_method": "mxfp4"}
    else:
        config["intermediate_size"] = count("feed_forward_length")
    bos, ends = metadata.get("tokenizer.ggml.bos_token_id"), end_token_ids(metadata, path)
    if bos is not None:
        config["bos_token_id"] = bos
    if ends:
        config |= {"eos_token_id": ends[0], "generation_eos_token_id": ends}
    return config


def _dtype(header: GGUFHeader) -> str:
    """Return the type that most of the file's bytes have; "float32" if they are quantised."""
    nbytes: Counter[GGMLQuantizationType] = Counter()
    for tensor in header.tensors.values():
        nbytes[tensor.kind] += tensor.nbytes
    return _DTYPES.get(nbytes.most_common(1)[0][0], "float32")


def _rope_scaling(metadata: dict[str, Any], arch: str, path: Path, rope_factors: Sequence[float] | None,
                  head_dim: int) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    factor = metadata.get(prefix + "factor", 1.0)
    original = metadata.get(prefix + "original_context_length", metadata.get(f"{arch}.context_length", 0))
    if rope_factors is not None and any(value != 1.0 for value in rope_factors):
        theta = metadata.get(f"{arch}.rope.freq_base", 10000.0)
        return _llama3_scaling(rope_factors, theta, head_dim, path)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "llama3":
        return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original,
                "low_freq_factor": metadata.get(prefix + "low_freq_factor", 1.0),
                "high_freq_factor": metadata.get(prefix + "high_freq_factor", 4.0)}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                   "beta_fast": metadata.get(prefix + "yarn_beta_fast", 32.0),
                   "beta_slow": metadata.get(prefix + "yarn_beta_slow", 1.0)}
        if arch == "gpt-oss":
            scaling["truncate"] = False
        return scaling
    raise CheckpointError(f"{path} scales rope by {short_repr(kind)}, which is not supported; supported are none, "
                              "linear, llama3 and yarn")


def _llama3_scaling(factors: Sequence[float], theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """Return the llama3 parameters that give these divisors: the file stores the divisors only."""
    if 2 * len(factors) != head_dim or not all(0 < one <= MOST_NUMBER for one in factors):
        raise CheckpointError(f"{path}: tensor rope_freqs.weight does not hold a positive divisor for each of "
                              f"{head_dim // 2} pairs of dimensions")
    factor = max(factors)
    for original in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
        if all(math.isclose(given, made, rel_tol=1e-4)
               for given, made in zip(factors, _llama3_factors(factor, original, theta, head_dim), strict=True)):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original}
    raise CheckpointError(f"{path}: tensor rope_freqs.weight holds divisors that are not Llama 3's, which is "
                          "not supported")


def _llama3_factors(factor: float, original: int, theta: float, head_dim: int, low: float = 1.0,
                    high: float = 4.0) -> list[float]:
    result = []
    for index in range(0, head_dim, 2):
        rotations = original / (2 * math.pi * theta ** (index / head_dim))  # over the original context
        blend = min(max((rotations - low) / (high - low), 0.0), 1.0)
        result.append(1.0 / ((1.0 - blend) / factor + blend))
    return result
