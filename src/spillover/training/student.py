"""A small decoder in plain torch, to train draft models: a Llama with few layers and the model's frequent tokens.

It is initialised with evenly spaced layers of the model, from first to last, and its embeddings, and is saved as a
folder that the engine loads like any other model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from spillover.engine.speculation.drafters.vocabulary import DRAFT_VOCAB_FILE
from spillover.models.architectures import llama
from spillover.models.checkpoint import Checkpoint
from spillover.models.config import ModelConfig
from spillover.models.rope import rope_tables

SPREAD = 0.02  # standard deviation of initial weights that are not copied from the model
_MATRICES = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
             "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}


def student_config(target: ModelConfig, hf: dict[str, Any], layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a draft model for the model `target`."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size or 3 * target.hidden_size, "num_hidden_layers": layers,
        "num_attention_heads": target.num_heads, "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim, "vocab_size": vocab_size, "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.rms_norm_eps, "rope_theta": target.rope_theta, "rope_scaling": hf.get("rope_scaling"),
        "tie_word_embeddings": target.tie_embeddings, "torch_dtype": "bfloat16", "hidden_act": "silu",
    }


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head = config.num_heads, config.num_kv_heads, head
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the layer, x [B, T, hidden] -> [B, T, hidden]; cos and sin [T, head_dim / 2]."""
        count, length, _ = x.shape
        normed = self.input_layernorm(x)
        q = self.q_proj(normed).view(count, length, self.heads, self.head).transpose(1, 2)
        k = self.k_proj(normed).view(count, length, self.kv_heads, self.head).transpose(1, 2)
        v = self.v_proj(normed).view(count, length, self.kv_heads, self.head).transpose(1, 2)
        repeats = self.heads // self.kv_heads
        k, v = apply_rope(k, cos, sin).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        attended = F.scaled_dot_product_attention(apply_rope(q, cos, sin), k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).reshape(count, length, -1))
        normed = self.post_attention_layernorm(x)
        mixed: Tensor = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return mixed


class Student(nn.Module):
    def __init__(self, hf: dict[str, Any], positions: int, device: torch.device) -> None:
        """Make a decoder from its config.json `hf`, for sequences of up to `positions` tokens."""
        super().__init__()
        self.hf = hf
        self.config = config = llama.config(hf)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(device)
        self.cos, self.sin = rope_tables(config, positions, device)

    def forward(self, ids: Tensor) -> Tensor:
        """Run the model, ids [B, T] -> hidden states [B, T, hidden] after the final norm."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)

    @torch.no_grad()
    def init_from(self, checkpoint: Checkpoint, target_layers: int, target_ids: Tensor) -> None:
        """Initialise with evenly spaced layers of the model and its embeddings of these tokens; the additional id for
        unknown tokens gets the mean of these embeddings."""
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
        copy_weight(self.embed_tokens.weight, _rows(checkpoint.read("model.embed_tokens.weight"), target_ids,
                                                    self.config.vocab_size))
        if self.lm_head is not None:
            copy_weight(self.lm_head.weight, _rows(checkpoint.read("lm_head.weight"), target_ids,
                                                   self.config.vocab_size))
        copy_weight(self.norm.weight, checkpoint.read("model.norm.weight"))
        names, count = checkpoint.names(), len(self.layers)
        for index, layer in enumerate(self.layers):
            source = round(index * (target_layers - 1) / max(1, count - 1))
            for name, weight in layer.named_parameters():
                short = name.removesuffix(".weight")
                part = f"{_MATRICES[short]}.{short}" if short in _MATRICES else short
                full = f"model.layers.{source}.{part}.weight"
                if full in names:
                    copy_weight(weight, checkpoint.read(full))

    def save(self, folder: Path, target_ids: Tensor | None) -> None:
        """Write the folder, in bfloat16. `target_ids`: the model's ids of this model's tokens; None: all tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, weight in self.named_parameters():
            *path, last, kind = name.split(".")
            part = f"{_MATRICES[last]}.{last}" if last in _MATRICES else last
            full = ".".join([*path, part, kind])
            full = full if full.startswith("lm_head") else f"model.{full}"
            tensors[full] = weight.detach().to(torch.bfloat16).cpu().contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.hf, indent=2) + "\n")
        if target_ids is not None:
            (folder / DRAFT_VOCAB_FILE).write_text(json.dumps({"target_ids": target_ids.tolist()}) + "\n")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to pairs (i, i + head_dim / 2), as the engine does."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def _rows(matrix: Tensor, ids: Tensor, count: int) -> Tensor:
    rows = matrix.float()[ids]
    return torch.cat((rows, rows.mean(0, keepdim=True).expand(count - len(ids), -1))) if count > len(ids) else rows


def copy_weight(weight: Tensor, value: Tensor) -> None:
    if weight.shape == value.shape:
        weight.copy_(value.float())
