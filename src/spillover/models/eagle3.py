"""EAGLE-3 heads: one decoder layer that drafts from hidden states of the model that it was trained for.

A row of the head is a token and the model's state at the position before it: `fc` makes one vector of the model's
hidden states after some of its layers; for further draft tokens, the head's own output takes the place of that vector.
Slot p of its KV belongs to token p and the hidden states of position p - 1 (zeros for position 0), so that no block of
KV depends on a later token. The head's KV is stored as one more layer in the model's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spillover.errors import CheckpointError, short_repr
from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE, EMBEDDING
from spillover.kernels.layer_kernels import kernels_on
from spillover.kernels.linear import linear
from spillover.models.config import ModelConfig, optional, parse_config, section
from spillover.models.loader import checkpoint_tensors
from spillover.models.rope import rope_tables
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs

if TYPE_CHECKING:
    from spillover.models.checkpoint import Checkpoint

PART = "eagle3"  # the part that has all of the head's weights
LAYERS = ("midlayer.", "layers.0.")  # alternative prefixes of the names of the layer's tensors
NUM_TAPS = 3  # default number of hidden states that `fc` reads


@dataclass(frozen=True)
class HeadConfig:
    """The configuration of a head."""

    layer: ModelConfig
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the model whose inputs the head reads: 2 is the output of the second layer
    own_embedding: bool  # whether it has an embedding; otherwise it uses the model's
    mapped: bool  # whether tensor `d2t` maps its tokens to the model's; otherwise the ids are the same
    norm_before_residual: bool = False  # whether the residual of the layer is normed
    norm_before_fc: bool = False  # whether the input of `fc` is normed
    norm_output: bool = False  # whether the output that replaces hidden states in the next pass is normed


class HeadWeights(LayerWeights, total=False):
    fc: Linear
    fc_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    lm_head: Linear
    embedding: Linear
    targets: Tensor  # [draft vocabulary] int64: the model's token id for each of the head's tokens


def read_head(hf: Mapping[str, Any], path: Path, target: ModelConfig, names: set[str] | None) -> HeadConfig:
    """Parse the configuration of a head for a model. `names`: of its tensors; None: it has dummy weights."""
    try:
        return _parse(hf, target, names)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def _parse(hf: Mapping[str, Any], target: ModelConfig, names: set[str] | None) -> HeadConfig:
    nested, eagle = section(hf, "transformer_layer_config"), section(hf, "eagle_config")
    settings = {**eagle, **{key: value for key, value in hf.items() if value is not None}}
    shape = nested or hf
    layers = optional(shape, "num_hidden_layers") or 1
    if layers != 1:
        raise CheckpointError(f"it has {layers} layers, and an EAGLE-3 head has one; give a model that drafts by "
                              "itself as the method draft_model")
    layer = parse_config({**shape, "num_hidden_layers": 1}, qkv_bias=bool(shape.get("attention_bias", False)),
                         o_bias=bool(shape.get("attention_bias", False)), mlp_bias=bool(shape.get("mlp_bias", False)))
    target_hidden = optional(settings, "target_hidden_size") or layer.hidden_size
    if {layer.hidden_size, target_hidden} != {target.hidden_size}:
        raise CheckpointError(f"this EAGLE-3 head is for hidden states of size {target_hidden}, and those of the model "
                              f"have {target.hidden_size}: it was trained for another model")
    if (layer.num_kv_heads, layer.head_dim) != (target.num_kv_heads, target.head_dim):
        raise CheckpointError(f"this EAGLE-3 head has {layer.num_kv_heads} key/value heads of {layer.head_dim}, and "
                              f"the model {target.num_kv_heads} of {target.head_dim}: its KV does not fit into the "
                              "model's blocks, where it would be stored")
    for flag, most in (("fc_norm", False), ("use_aux_hidden_state", True)):
        if bool(settings.get(flag, most)) != most:
            raise CheckpointError(f"an EAGLE-3 head with {flag} {settings[flag]} is not supported")
    draft_vocab = optional(settings, "draft_vocab_size") or layer.vocab_size
    mapped = "d2t" in names if names is not None else draft_vocab < target.vocab_size
    if draft_vocab > target.vocab_size or (not mapped and draft_vocab != target.vocab_size):
        raise CheckpointError(f"this EAGLE-3 head has a vocabulary of {draft_vocab:,} tokens, and no tensor 'd2t' maps "
                              f"them to the model's {target.vocab_size:,}")
    own = names is not None and "embed_tokens.weight" in names
    if own and layer.vocab_size != target.vocab_size:
        raise CheckpointError(f"this EAGLE-3 head has embeddings of {layer.vocab_size:,} tokens, and the model has "
                              f"{target.vocab_size:,}: it was trained for another model")
    return HeadConfig(layer, draft_vocab, _taps(settings, target), own, mapped,
                      bool(settings.get("norm_before_residual")), bool(settings.get("norm_before_fc")),
                      bool(settings.get("norm_output")))


def _taps(settings: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    given, count, layers = settings.get("eagle_aux_hidden_state_layer_ids"), settings.get("num_aux_hidden_states"), \
        target.num_layers
    if given is None:
        if count not in (None, NUM_TAPS):
            raise CheckpointError(f"this EAGLE-3 head reads hidden states of {short_repr(count)} layers, and does not "
                                  "say of which (eagle_aux_hidden_state_layer_ids)")
        given = [2, layers // 2, layers - 3]  # as in vLLM
    if not isinstance(given, list) or not given or any(type(tap) is not int for tap in given):
        raise CheckpointError(f"eagle_aux_hidden_state_layer_ids is {short_repr(given)}, not a list of layers")
    out_of_range = [tap for tap in given if not 0 <= tap < layers]
    if out_of_range:
        raise CheckpointError(f"this EAGLE-3 head reads the hidden states before layer {out_of_range[0]}, and the "
                              f"model has the layers 0 to {layers - 1}: it was trained for another model")
    return tuple(given)


def head_specs(config: HeadConfig) -> WeightSpecs:
    layer, hidden = config.layer, config.layer.hidden_size
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    inner, fused = layer.intermediate_size, len(config.taps) * hidden
    specs = [
        _linear("fc", ("fc.weight",), (hidden,), fused, ("",)),
        _tensor("input_norm", "input_layernorm.weight", hidden),
        _tensor("hidden_norm", "hidden_norm.weight", hidden),
        _linear("qkv", tuple(f"self_attn.{name}_proj.weight" for name in "qkv"), (q, kv, kv), 2 * hidden),
        _linear("o", ("self_attn.o_proj.weight",), (hidden,), q),
        _tensor("mlp_norm", "post_attention_layernorm.weight", hidden),
        _linear("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (inner, inner), hidden),
        _linear("down", ("mlp.down_proj.weight",), (hidden,), inner),
        _tensor("norm", "norm.weight", hidden, ("",)),
        _linear("lm_head", ("lm_head.weight",), (config.draft_vocab_size,), hidden, ("",)),
    ]
    if layer.qkv_bias:
        specs.append(_tensor("qkv_bias", tuple(f"self_attn.{name}_proj.bias" for name in "qkv"), (q, kv, kv)))
    if layer.o_bias:
        specs.append(_tensor("o_bias", "self_attn.o_proj.bias", hidden))
    if layer.mlp_bias:
        specs += [_tensor("gate_up_bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), (inner, inner)),
                  _tensor("down_bias", "mlp.down_proj.bias", hidden)]
    if config.norm_before_fc:
        specs.append(_tensor("fc_norm", "input_norm.weight", fused, ("",)))
    if config.own_embedding:
        rows = layer.vocab_size
        specs.append(WeightSpec("embedding", (rows, hidden), (Source(("embed_tokens.weight",), (rows,)),), EMBEDDING))
    return {PART: specs}


def check_head(checkpoint: Checkpoint, config: HeadConfig, target: ModelConfig) -> None:
    """Check that a checkpoint has all tensors of a head, with the right shapes, and valid token ids."""
    checkpoint_tensors(checkpoint, config.layer, head_specs(config))
    if config.mapped:
        read_targets(checkpoint, config, target)


def read_targets(checkpoint: Checkpoint, config: HeadConfig, target: ModelConfig) -> Tensor:
    """Return the model's token id for each of the head's tokens."""
    found = checkpoint.read("d2t")
    if tuple(found.shape) != (config.draft_vocab_size,) or found.dtype.is_floating_point:
        raise CheckpointError(f"{checkpoint.file('d2t')}: tensor 'd2t' is {found.dtype} {list(found.shape)}, expected "
                              f"{config.draft_vocab_size} whole numbers")
    targets = torch.arange(config.draft_vocab_size) + found.long()
    if int(targets.min()) < 0 or int(targets.max()) >= target.vocab_size:
        raise CheckpointError(f"{checkpoint.file('d2t')}: tensor 'd2t' names tokens from {int(targets.min())} to "
                              f"{int(targets.max())}, and the model has 0 to {target.vocab_size - 1}: the head was "
                              "trained for another model")
    return targets


def dummy_targets(config: HeadConfig, target: ModelConfig) -> Tensor:
    """Return a mapping of the head's tokens for dummy weights: spread evenly over the model's vocabulary."""
    return torch.arange(config.draft_vocab_size) * target.vocab_size // config.draft_vocab_size


def _linear(name: str, tensors: tuple[str, ...], rows: tuple[int, ...], columns: int,
            at: tuple[str, ...] = LAYERS) -> WeightSpec:
    sources = tuple(Source(tuple(prefix + tensor for tensor in tensors), rows) for prefix in at)
    return WeightSpec(name, (sum(rows), columns), sources, DENSE)


def _tensor(name: str, tensors: str | tuple[str, ...], rows: int | tuple[int, ...],
            at: tuple[str, ...] = LAYERS) -> WeightSpec:
    names = (tensors,) if isinstance(tensors, str) else tensors
    sizes = (rows,) if isinstance(rows, int) else rows
    return WeightSpec(name, (sum(sizes),), tuple(Source(tuple(prefix + each for each in names), sizes)
                                                 for prefix in at))


class EagleHead:
    """The computation of a head. Weights, KV and token embeddings are passed to each call; it holds none of them."""

    def __init__(self, config: HeadConfig, device: torch.device, dtype: torch.dtype, num_positions: int) -> None:
        layer = config.layer
        self.config = config
        self.cos, self.sin = rope_tables(layer, num_positions, device)
        self.shape = LayerShape(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim**-0.5,
                                layer.rms_norm_eps)
        self.kernels = kernels_on(device, self.shape, self.cos, self.sin)

    def fuse(self, features: Tensor, w: HeadWeights) -> Tensor:
        """Fuse hidden states of the model [T, taps * hidden] into one vector per row [T, hidden]."""
        if self.config.norm_before_fc:
            features = self.kernels.rms_norm(features, w["fc_norm"])
        return linear(features, w["fc"])

    def store(self, embedded: Tensor, before: Tensor, w: HeadWeights, kv_layer: Tensor, batch: AttentionBatch) -> None:
        """Store the keys and values of rows; nothing else of them is needed, as the head has one layer only.

        `embedded` [T, hidden]: embedded tokens; `before` [T, hidden]: fused hidden states of the previous positions.
        """
        self.kernels.store(self._inputs(embedded, before, w)[0], w, kv_layer, batch)

    def draft(self, embedded: Tensor, before: Tensor, w: HeadWeights, kv_layer: Tensor, batch: AttentionBatch,
              window: int | None) -> tuple[Tensor, Tensor]:
        """Return logits [T, draft vocabulary] of the next tokens, and the hidden states for the next pass."""
        x, residual = self._inputs(embedded, before, w)
        x = self.kernels.attend(x, w, kv_layer, batch, window, 0)
        x, residual = self.kernels.mlp_block(x, residual, w)
        normed, total = self.kernels.add_rms_norm(x, residual, w["norm"])
        return linear(normed, w["lm_head"]), normed if self.config.norm_output else total

    def _inputs(self, embedded: Tensor, before: Tensor, w: HeadWeights) -> tuple[Tensor, Tensor]:
        """Return the input of the attention [T, 2 * hidden], and its residual [T, hidden]."""
        normed = self.kernels.rms_norm(before, w["hidden_norm"])
        tokens = self.kernels.rms_norm(embedded, w["input_norm"])
        return torch.cat((tokens, normed), dim=-1), normed if self.config.norm_before_residual else before
