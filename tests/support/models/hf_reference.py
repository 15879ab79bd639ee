"""Small random models of every architecture, computed by Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 320
MAX_POSITION = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6}
_SLIDING = {"use_sliding_window": True, "sliding_window": 9}

_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama_tied_llama3_rope": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True, rope_parameters=dict(_LLAMA3)),
    "llama_biases_linear_rope": lambda: LlamaConfig(
        **_SHAPE, attention_bias=True, mlp_bias=True, head_dim=24, rope_parameters=dict(_LINEAR)
    ),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=None),
    "mistral_sliding": lambda: MistralConfig(**_SHAPE, sliding_window=9),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen2_sliding": lambda: Qwen2Config(**{**_SHAPE, "num_hidden_layers": 4}, **_SLIDING, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
    "mixtral": lambda: MixtralConfig(**_SHAPE, **_EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **{**_SHAPE, "num_hidden_layers": 4},
        head_dim=32,
        num_experts_per_tok=3,
        num_experts=8,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3_moe_sparse_step": lambda: Qwen3MoeConfig(
        **_SHAPE,
        num_experts_per_tok=2,
        num_experts=4,
        moe_intermediate_size=48,
        decoder_sparse_step=2,
        norm_topk_prob=False,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **{**_SHAPE, "num_hidden_layers": 4}, **_EXPERTS, head_dim=32, sliding_window=8, rope_parameters=dict(_YARN)
    ),
}


def all_architectures() -> list[str]:
    return list(_CONFIGS)


def tiny_model(name: str, seed: int = 0) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a float32 model and its config.json; all tensors are random, also those that usually start at 0 or 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model, config_dict(model)


def config_dict(model: PreTrainedModel) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def save_checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    """Save a folder as on the Hugging Face hub: config.json and safetensors."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return [len(tokens), vocab], computed in one pass without a cache."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int, guess: list[int] | None = None) -> list[int]:
    """Return the tokens that `generate` adds to the prompt. A `guess` is checked in one pass: it is right if each of
    its tokens has the highest score after those before it."""
    if guess is not None and len(guess) == count:
        with torch.inference_mode():
            scores = model(torch.tensor([prompt + guess])).logits[0, len(prompt) - 1 : -1]
        if scores.argmax(1).tolist() == guess:
            return guess
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    new: list[int] = out[0, len(prompt) :].tolist()
    return new
