"""EAGLE-3 heads in the published format, and a reference for their drafts in plain torch, for transformers models."""

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
    """Return random head weights for a model."""
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
    """A head by its definition. Row p is computed from token p and the hidden states of position p - 1."""

    def __init__(self, target: PreTrainedModel, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.target, self.config, self.w = target, config, tensors
        layers = target.config.num_hidden_layers
        kinds = getattr(target.config, "layer_types", None) or []
        # The head's window is that of the first kind of layers: none if a layer has full attention.
        self.window = None if "full_attention" in kinds else getattr(target.config, "sliding_window", None)
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
        """Return the tokens drafted after `tokens`; the first row and those in `without` follow zeros."""
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
        """Return the logits, and the head's substitutes for hidden states, of all rows [T, hidden] at once."""
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
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.w[name]


def turned(x: Tensor) -> Tensor:
    """Rotate x [heads, T, dim] by the positions (RoPE)."""
    dim = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[1]).float(), THETA ** (-torch.arange(0, dim, 2).float() / dim))
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


DISTANCE = 12  # positions between the newest token and the older one that predict a predictable model's next token
_SHARP = 300.0  # attention score of the position that is looked for, relative to positions that do not match


def predictable(target: PreTrainedModel, spread: float = 0.02) -> dict[str, Tensor]:
    """Change a Llama of 64 dimensions, with 4 heads and 2 key/value heads, so that its next token depends on the newest
    token, on the one DISTANCE before it, and slightly on all others; return a head that uses the first two.

    The first dimension of embeddings is 1: keys and queries are made of it alone, and match after rotation at a
    distance. The head finds the older token only in its KV.
    """
    made, config = torch.Generator().manual_seed(1), target.config
    hidden, dim, vocab = config.hidden_size, config.hidden_size // config.num_attention_heads, config.vocab_size
    tokens = torch.randn(vocab, 31, generator=made)
    embedded = torch.zeros(vocab, hidden)
    embedded[:, 0] = 1.0
    embedded[:, 1:32] = tokens * ((hidden - 1) / tokens.square().sum(1, keepdim=True)).sqrt()  # mean square 1
    mixed = torch.randn(32, 32, generator=made) / 4  # maps the older token to its contribution
    said = torch.randn(vocab, hidden, generator=made)
    layer = target.model.layers[0]
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(spread)
            elif "norm" in name:
                weight.fill_(1.0)
        target.model.embed_tokens.weight.copy_(embedded)
        target.lm_head.weight.copy_(said)
        distances = [DISTANCE] * 4
        layer.self_attn.q_proj.weight.copy_(torch.cat([_query(hidden, dim, each) for each in distances]))
        layer.self_attn.k_proj.weight.copy_(_query(hidden, dim, 0).repeat(2, 1))
        layer.self_attn.v_proj.weight.copy_(torch.eye(32, hidden))
        # Heads 0 and 1 carry the first half of the older token's vector, 2 and 3 the second.
        layer.self_attn.o_proj.weight.copy_(torch.zeros(hidden, hidden))
        layer.self_attn.o_proj.weight[:32, :dim] = mixed[:, :16]
        layer.self_attn.o_proj.weight[:32, 2 * dim:3 * dim] = mixed[:, 16:]
    head = head_tensors(target, vocab - 20)
    twice, out = torch.zeros(32, hidden), torch.zeros(hidden, hidden)
    # Heads 0 and 2 attend to the newest token, 1 and 3 to the older one.
    out[:32, :dim], out[:32, 2 * dim:3 * dim] = torch.eye(32)[:, :16], torch.eye(32)[:, 16:]
    out[:32, dim:2 * dim], out[:32, 3 * dim:] = mixed[:, :16], mixed[:, 16:]
    for name, weight in head.items():
        if "norm" in name:
            weight.fill_(1.0)
    head["midlayer.hidden_norm.weight"].fill_(1e-3)  # hidden states of earlier positions contribute almost nothing
    head["midlayer.self_attn.q_proj.weight"] = torch.cat(
        [torch.cat((_query(hidden, dim, each), twice[:dim]), 1) for each in (0, DISTANCE, 0, DISTANCE)])
    head["midlayer.self_attn.k_proj.weight"] = torch.cat((_query(hidden, dim, 0).repeat(2, 1), twice), 1)
    head["midlayer.self_attn.v_proj.weight"] = torch.cat((torch.eye(32, hidden), twice), 1)
    head["midlayer.self_attn.o_proj.weight"] = out
    head["midlayer.mlp.down_proj.weight"] *= spread
    head["lm_head.weight"] = said[torch.arange(vocab - 20) + head["d2t"]].clone()
    return head


def _query(hidden: int, dim: int, distance: int) -> Tensor:
    """Return [dim, hidden]: maps the first dimension to a query that matches the key `distance` positions before."""
    turns = distance * THETA ** (-torch.arange(0, dim, 2).float() / dim)
    size = (_SHARP * dim**0.5 / 4) ** 0.5
    made = torch.zeros(dim, hidden)
    for index in range(4):  # slower dimensions hardly distinguish positions
        made[index, 0] = size * turns[index].cos()
        made[index + dim // 2, 0] = -size * turns[index].sin()
    return made
