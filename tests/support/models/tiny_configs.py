"""Configurations of models small enough for any machine, with random weights."""

from __future__ import annotations

from typing import Any

# Two layers: one with full attention and one with a window of nine.
WINDOWED: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "eos_token_id": 3, "torch_dtype": "float32", "tie_word_embeddings": True,
    "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
}
