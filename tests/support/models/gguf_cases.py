"""Configurations of each architecture supported in GGUF files."""

from __future__ import annotations

from typing import Any

import torch
from gguf import MODEL_ARCH
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FIELDS: dict[str, Any] = {"block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
                          "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
                          "attention.layer_norm_rms_epsilon": 1e-5}
CASES: dict[str, tuple[MODEL_ARCH, PreTrainedConfig, dict[str, Any]]] = {
    "llama": (MODEL_ARCH.LLAMA, LlamaConfig(**SHAPE), {}),
    "llama with biases, tied": (
        MODEL_ARCH.LLAMA, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), {}),
    "qwen2": (MODEL_ARCH.QWEN2, Qwen2Config(**SHAPE), {}),
    "qwen3": (MODEL_ARCH.QWEN3, Qwen3Config(**SHAPE, head_dim=32), {"attention.key_length": 32}),
    "mixtral": (MODEL_ARCH.LLAMA, MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
                {"expert_count": 4, "expert_used_count": 2}),
    "qwen3moe": (MODEL_ARCH.QWEN3MOE,
                 Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                norm_topk_prob=True, head_dim=16),
                 {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
                  "attention.key_length": 16}),
    "gpt-oss": (MODEL_ARCH.GPT_OSS,
                GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8,
                             attn_implementation="eager"),
                {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96,
                 "attention.key_length": 16, "attention.sliding_window": 8}),
}


def random_model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model
