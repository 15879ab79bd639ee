"""An EAGLE-3 head in plain torch for training, saved in the format in which heads are published.

It is trained in the way it drafts: in every pass after the first, its own output of the previous row takes the place of
the model's hidden states, and it attends to keys of the first pass up to the start of a draft, then of later passes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from spillover.models.checkpoint import Checkpoint
from spillover.models.config import ModelConfig
from spillover.models.rope import rope_tables
from spillover.training.student import SPREAD, apply_rope, copy_weight

_LAYER = {"input_layernorm": "", "hidden_norm": "", "post_attention_layernorm": "", "q_proj": "self_attn.",
          "k_proj": "self_attn.", "v_proj": "self_attn.", "o_proj": "self_attn.", "gate_proj": "mlp.",
          "up_proj": "mlp.", "down_proj": "mlp."}
_TOP = ("fc", "norm", "lm_head")  # modules outside the layer


def default_taps(layers: int) -> list[int]:
    """Return the layers whose inputs a head reads: low, middle and high; the nearest ones if there are few layers."""
    return [min(2, layers - 1), layers // 2, max(layers - 3, 0)]


def head_config(target: ModelConfig, hf: dict[str, Any], draft_vocab: int) -> dict[str, Any]:
    """Return the config.json of a head for the model `target`."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size or 3 * target.hidden_size, "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads, "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim, "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab,
        "max_position_embeddings": target.max_position, "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta, "rope_scaling": hf.get("rope_scaling"),
        "rope_parameters": hf.get("rope_parameters"), "torch_dtype": "bfloat16",
        "hidden_act": "silu", "eagle_config": {"eagle_aux_hidden_state_layer_ids": default_taps(target.num_layers)},
    }


class HeadStudent(nn.Module):
    def __init__(self, target: ModelConfig, hf: dict[str, Any], positions: int, device: torch.device) -> None:
        """Make a head from its config.json `hf`, for sequences of up to `positions` tokens."""
        super().__init__()
        self.hf, self.config = hf, target
        hidden, inner, dim = target.hidden_size, hf["intermediate_size"], target.head_dim
        q, kv = target.num_heads * dim, target.num_kv_heads * dim
        self.taps: list[int] = hf["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            nn.RMSNorm(hidden, target.rms_norm_eps) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * hidden, rows, bias=False) for rows in (q, kv, kv))
        self.o_proj = nn.Linear(q, hidden, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, hf["draft_vocab_size"], bias=False)
        self.register_buffer("embedded", torch.zeros(target.vocab_size, hidden), persistent=False)  # the model's
        self.to(device)
        self.cos, self.sin = rope_tables(target, positions, device)

    def forward(self, ids: Tensor, features: Tensor, passes: int) -> list[Tensor]:
        """Run the passes, ids [B, T] and hidden states of the model [B, T, taps * hidden] -> for each pass the output
        after the final norm [B, T, hidden]. Row p predicts token p + 1; in pass n, rows are valid from position n
        on."""
        embedded = self.input_layernorm(F.embedding(ids, self.get_buffer("embedded")))
        before, keys, outputs = F.pad(self.fc(features)[:, :-1], (0, 0, 1, 0)), [], []
        for _ in range(passes):
            x = torch.cat((embedded, self.hidden_norm(before)), dim=-1)
            tables = self._rope_tables(ids)
            keys.append((apply_rope(self._heads(self.k_proj(x)), *tables), self._heads(self.v_proj(x))))
            x = before + self.o_proj(self._attend(apply_rope(self._heads(self.q_proj(x)), *tables), keys))
            normed = self.post_attention_layernorm(x)
            x = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
            outputs.append(self.norm(x))
            before = F.pad(x[:, :-1], (0, 0, 1, 0))
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def _rope_tables(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]

    def _heads(self, x: Tensor) -> Tensor:
        """Split heads, x [B, T, heads * dim] -> [B, heads, T, dim]."""
        return x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def _attend(self, q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute attention of the last pass, n, as [B, T, heads * dim]: row p attends to the keys of the first pass up
        to p - n, and of each later pass i to the key at p - n + i."""
        repeats, last, length = q.shape[1] // keys[0][0].shape[1], len(keys) - 1, q.shape[2]
        wide = [(k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)) for k, v in keys]
        scale = self.config.head_dim**-0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-last)
        scores = (q @ wide[0][0].transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
        shifted = [(k.roll(last - index, 2), v.roll(last - index, 2)) for index, (k, v) in enumerate(wide) if index]
        later_scores = [(q * k).sum(-1, keepdim=True) * scale for k, _ in shifted]
        # Rows below n are invalid, as no draft can begin before them, and are not used.
        weights = torch.cat([scores, *later_scores], dim=-1).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ wide[0][1]
        for index, (_, v) in enumerate(shifted):
            out = out + weights[..., length + index:length + index + 1] * v
        return out.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def init_from(self, checkpoint: Checkpoint, target_layers: int, target_ids: Tensor) -> None:
        """Initialise the layer as the model's last one, applied to the highest hidden state, and the output head by the
        model's rows for these tokens; the weights of the token's embedding start small."""
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
        hidden, names = self.config.hidden_size, checkpoint.names()
        table = checkpoint.read("model.embed_tokens.weight").float()
        self.get_buffer("embedded").copy_(table)
        head = checkpoint.read("lm_head.weight").float() if "lm_head.weight" in names else table
        self.lm_head.weight.copy_(head[target_ids])
        copy_weight(self.norm.weight, checkpoint.read("model.norm.weight"))
        self.fc.weight[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
        for name, at in _LAYER.items():
            full = f"model.layers.{target_layers - 1}.{at}{name}.weight"
            if full not in names:
                continue
            weight = self.get_submodule(name).get_parameter("weight")
            wide = weight.dim() > 1 and weight.shape[1] == 2 * hidden
            copy_weight(weight[:, hidden:] if wide else weight, checkpoint.read(full).float())
        self.hidden_norm.weight.copy_(self.input_layernorm.weight)

    def save(self, folder: Path, target_ids: Tensor | None) -> None:
        """Write the folder, in bfloat16. `target_ids`: the model's ids of this head's tokens; None: all tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, weight in self.named_parameters():
            module = name.removesuffix(".weight")
            full = name if module in _TOP else f"midlayer.{_LAYER[module]}{name}"
            tensors[full] = weight.detach().to(torch.bfloat16).cpu().contiguous()
        if target_ids is not None:
            tensors["d2t"] = target_ids.cpu().long() - torch.arange(len(target_ids))
            tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, target_ids.cpu(), 1)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.hf, indent=2) + "\n")
