"""EAGLE-3 heads in the published format, and what they draft by the definition: plain torch beside transformers."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

EPS = 1e-5
THETA = 10_000.0


def head_tensors(target: PreTrainedModel, draft_vocab: int, seed: int = 0, taps: int = 3,
                 spread: float = 0.1) -> dict[str, Tensor]:
    """Return random weights of a head for a model."""
    made, config = torch.Generator().manual_seed(seed), target.config
    hidden, inner = config.hidden_size, 2 * config.hidden_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or hidden // heads

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=made) * spread

    def norm() -> Tensor:
        return torch.rand(hidden, generator=made) + 0.5

    tokens = torch.randperm(config.vocab_size, generator=made)[:draft_vocab].sort().values
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[tokens] = True
    return {
        "fc.weight": matrix(hidden, taps * hidden), "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab, hidden),
        "midlayer.input_layernorm.weight": norm(), "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden), "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "d2t": tokens - torch.arange(draft_vocab), "t2d": known,
    }


def head_config(target: PreTrainedModel, tensors: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    config = target.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": config.hidden_size, "intermediate_size": tensors["midlayer.mlp.up_proj.weight"].shape[0],
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": dim, "vocab_size": config.vocab_size, "draft_vocab_size": len(tensors["lm_head.weight"]),
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 256, "torch_dtype": "float32", **more}


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return folder


class ReferenceHead:
    """A head as it is defined. Row p is of token p and of the hidden states of position p - 1."""

    def __init__(self, target: PreTrainedModel, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.target, self.config, self.w = target, config, tensors
        layers = target.config.num_hidden_layers
        self.window = getattr(target.config, "sliding_window", None)  # of a model all of whose layers have it
        self.taps = config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """Return hidden states [len(tokens), taps * hidden]."""
        found = self.target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[tap][0] for tap in self.taps], dim=-1)

    def fused(self, features: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            features = self.norm(features, "input_norm.weight")
        return features @ self.w["fc.weight"].T

    @torch.no_grad()
    def draft(self, tokens: list[int], count: int, without: Set[int] = frozenset()) -> list[int]:
        """Return the tokens drafted behind these; rows in `without` follow zeros, and so does the first."""
        before = F.pad(self.fused(self.features(tokens))[:-1], (0, 0, 1, 0))
        before[list(without | {0})] = 0
        tokens, drafted = list(tokens), []
        for _ in range(count):
            logits, stands_in = self.rows(torch.tensor(tokens), before)
            own = int(logits[-1].argmax())
            drafted.append(own + (int(self.w["d2t"][own]) if "d2t" in self.w else 0))
            tokens.append(drafted[-1])
            before = torch.cat((before, stands_in[-1:]))
        return drafted

    def rows(self, tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and what stands in for hidden states, of all rows [T, hidden] at once."""
        layer, w = "midlayer.", self.w
        embedding = w.get("embed_tokens.weight")
        embedded = F.embedding(tokens, self.target.get_input_embeddings().weight if embedding is None else embedding)
        hidden = self.norm(before, layer + "hidden_norm.weight")
        residual = hidden if self.config.get("norm_before_residual") else before
        x = torch.cat((self.norm(embedded, layer + "input_layernorm.weight"), hidden), dim=-1)
        dim = self.config["head_dim"]
        q, k, v = ((x @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(len(x), -1, dim).transpose(0, 1)
                   for name in "qkv")
        q, k = turned(q), turned(k)
        groups = len(q) // len(k)
        visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if self.window is not None:
            visible = visible.triu(1 - self.window)
        out = F.scaled_dot_product_attention(q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0), visible)
        residual = residual + out.transpose(0, 1).reshape(len(x), -1) @ w[layer + "self_attn.o_proj.weight"].T
        x = self.norm(residual, layer + "post_attention_layernorm.weight")
        inner = F.silu(x @ w[layer + "mlp.gate_proj.weight"].T) * (x @ w[layer + "mlp.up_proj.weight"].T)
        total = residual + inner @ w[layer + "mlp.down_proj.weight"].T
        normed = self.norm(total, "norm.weight")
        return normed @ w["lm_head.weight"].T, normed if self.config.get("norm_output") else total

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.w[name]


def turned(x: Tensor) -> Tensor:
    """Rotate x [heads, T, dim] by its positions."""
    dim = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[1]).float(), THETA ** (-torch.arange(0, dim, 2).float() / dim))
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def train_head(target: PreTrainedModel, tensors: dict[str, Tensor], texts: list[list[int]], steps: int) -> None:
    """Teach a head to say what follows in texts of the model, one and two tokens ahead."""
    head = ReferenceHead(target, head_config(target, tensors), tensors)
    learned = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    for tensor in learned:
        tensor.requires_grad_()
    own = torch.full((target.config.vocab_size,), -100)
    draft = torch.arange(len(tensors["d2t"]))
    own[draft + tensors["d2t"]] = draft
    kept = [(torch.tensor(text), head.features(text)) for text in texts]
    optimizer = torch.optim.Adam(learned, lr=3e-3)
    for step in range(steps):
        loss = torch.zeros(())
        for tokens, features in kept[step % 4::4]:
            before = F.pad(head.fused(features)[:-1], (0, 0, 1, 0))
            for ahead in range(2):
                logits, stands_in = head.rows(tokens, before)
                loss = loss + F.cross_entropy(logits[ahead:-1], own[tokens[1 + ahead:]])
                before = F.pad(stands_in[:-1], (0, 0, 1, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for tensor in learned:
        tensor.requires_grad_(False)
