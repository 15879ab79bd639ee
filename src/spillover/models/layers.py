"""The decoder that all supported architectures are variants of, and the specs of its weights.

A variant overrides `mlp` and lists its own weights. Weights and KV are passed to each call; a decoder holds neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.batch import AttentionBatch, LayerShape
from spillover.kernels.cpu_kernels import LayerStack
from spillover.kernels.formats.base import WeightFormat, make_format
from spillover.kernels.formats.choice import Dequantized
from spillover.kernels.formats.dense import DENSE, EMBEDDING
from spillover.kernels.layer_kernels import kernels_on
from spillover.kernels.linear import embedding, linear
from spillover.kernels.moe.moe import LocalExperts, Routing
from spillover.models.config import ModelConfig
from spillover.models.groups import LayerGroup, layer_groups
from spillover.models.rope import rope_tables
from spillover.models.sharding.ranks import ONE_RANK, Ranks
from spillover.models.sharding.shard import Shard
from spillover.models.weight_specs import Source, WeightSpec, WeightSpecs, layer_part, stored_in
from spillover.models.weights import PartWeights, ResidentWeights, Weights


@dataclass(frozen=True)
class ModelStep:
    """The tokens of one step: T rows, ordered by request."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: tuple[AttentionBatch, ...]  # one per layer group


Tap = tuple[int, Tensor]  # a layer, and the buffer [T, hidden] to write its input hidden states to


class KVViews:
    """Each layer's view of the pool [num_blocks, group_layers, 2, kv_heads, block_size * head_dim]."""

    def __init__(self, pool: Tensor, groups: Sequence[LayerGroup]) -> None:
        self.pool = pool
        self._views = {
            layer: (pool[:, index], group)
            for group, members in enumerate(groups)
            for index, layer in enumerate(members.layers)
        }

    def layer(self, layer: int) -> tuple[Tensor, int]:
        """Return the layer's view [num_blocks, 2, kv_heads, block_size * head_dim], and the index of its layer group,
        whose block tables index the view."""
        return self._views[layer]


class Decoder:
    """A decoder whose layers are attention and a gated MLP, each with a norm before it and added to the residual.

    With several ranks, each computes its part of both halves of a layer; an all-reduce adds the parts after each half.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, num_positions: int | None = None,
        shard: Shard | None = None, ranks: Ranks = ONE_RANK,
    ) -> None:
        """Make the model. `config`: of the whole model. `num_positions`: maximum length of requests, if it is less than
        the model allows. `shard`: the part that this rank of `ranks` computes; None: everything."""
        shard = shard or Shard()
        assert (shard.rank, shard.size) == (ranks.rank, ranks.size)
        self.ranks = ranks
        self.vocabulary, self._vocabulary_width = (shard.vocabulary(config.vocab_size),
                                                   shard.vocabulary_width(config.vocab_size))
        local = shard.experts(config.num_experts)
        self.local_experts = None if local is None else LocalExperts(
            local.start, local.stop, ranks.expert_rows if ranks.rank == 0 else None)
        config = shard.decoder(config)
        self.config = config
        self.dtype = dtype
        self.groups = layer_groups(config)
        self.cos, self.sin = rope_tables(config, num_positions or config.max_position, device)
        self._parts = [layer_part(layer) for layer in range(config.num_layers)]
        self.shape = LayerShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, config.rms_norm_eps
        )
        self.kernels = kernels_on(device, self.shape, self.cos, self.sin)

    def forward(self, step: ModelStep, weights: Weights, kv: KVViews, taps: Sequence[Tap] = ()) -> Tensor:
        """Return hidden states [T, hidden] after the final norm. Stores the step's keys and values in `kv`, and the
        inputs of some layers in `taps`."""
        x, residual = self._embed(step, weights)
        x, residual = self._layers(x, residual, step, weights, kv, taps)
        return self._final_norm(x, residual, weights)

    def stack(self, weights: ResidentWeights, kv: KVViews) -> LayerStack | None:
        """Bind all layers to weights and KV that never move, on a CPU; None if a layer is not in panels or not all of
        its experts are resident, or if there are several ranks."""
        if self.ranks.size > 1:
            return None
        layers = [weights.bind_part(part) for part in self._parts]
        if not LayerStack.serves(layers):
            return None
        places, config = [kv.layer(layer) for layer in range(len(layers))], self.config
        routing = None
        if config.is_moe:
            routing = Routing(config.experts_per_token, config.norm_topk_prob, config.swiglu_limit)
        return LayerStack(self.shape, self.cos, self.sin, layers, places, config.windows, routing)

    def forward_stacked(self, step: ModelStep, weights: Weights, kv: KVViews, stack: LayerStack | None,
                        on_layers: Callable[[], None], taps: Sequence[Tap] = ()) -> Tensor:
        """Compute `forward` with all layers in one native call, if there is a stack and it supports the step.

        `on_layers` is called just before the layers run.
        """
        x, residual = self._embed(step, weights)
        if stack is None or not stack.run(x, residual, step.attention, on_layers, taps):
            on_layers()
            x, residual = self._layers(x, residual, step, weights, kv, taps)
        return self._final_norm(x, residual, weights)

    def embed(self, token_ids: Tensor, weights: Weights) -> Tensor:
        """Look up embeddings, token_ids [T] -> [T, hidden]."""
        with weights.part("embed") as w:
            if self.ranks.size == 1:
                return embedding(token_ids, w["embedding"], self.dtype)
            first, stop = self.vocabulary
            in_shard = (token_ids >= first) & (token_ids < stop)
            part = embedding(torch.where(in_shard, token_ids - first, 0), w["embedding"], self.dtype)
        # All ranks but one contribute zeros to a row, so the sum is exact.
        return self.ranks.all_reduce(part * in_shard.unsqueeze(1))

    def _embed(self, step: ModelStep, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return the first layer's inputs: x, which is zero, and the residual, which are the embeddings."""
        residual = self.embed(step.token_ids, weights)
        return torch.zeros_like(residual), residual

    def _layers(self, x: Tensor, residual: Tensor, step: ModelStep, weights: Weights, kv: KVViews,
                taps: Sequence[Tap]) -> tuple[Tensor, Tensor]:
        for layer, part in enumerate(self._parts):
            for tapped, total in taps:
                if tapped == layer:
                    torch.add(x, residual, out=total)
            kv_layer, group = kv.layer(layer)
            batch, window = step.attention[group], self.config.windows[layer]
            with weights.part(part) as w:
                x, residual = self.kernels.attention_block(x, residual, w, kv_layer, batch, window, layer)
                x = self.ranks.all_reduce(x)
                x, residual = self.mlp(layer, x, residual, w)
                x = self.ranks.all_reduce(x)
        return x, residual

    def _final_norm(self, x: Tensor, residual: Tensor, weights: Weights) -> Tensor:
        with weights.part("head") as w:
            return self.kernels.add_rms_norm(x, residual, w["norm"])[0]

    def logits(self, hidden: Tensor, weights: Weights) -> Tensor:
        """Compute logits, hidden [R, hidden] -> [R, vocab]; valid at rank 0 only."""
        tied = self.config.tie_embeddings
        with weights.part("embed" if tied else "head") as w:
            logits = linear(hidden, w["embedding"] if tied else w["lm_head"])
        return logits if self.ranks.size == 1 else self._gathered(logits)

    def _gathered(self, logits: Tensor) -> Tensor:
        """Concatenate the logits of all ranks; narrower parts are padded, as all must be sent with one width."""
        width = self._vocabulary_width
        parts = self.ranks.gather(F.pad(logits, (0, width - logits.shape[1])) if logits.shape[1] < width else logits)
        if not parts:
            return logits
        bounds = [Shard(rank, self.ranks.size).vocabulary(self.config.vocab_size) for rank in range(self.ranks.size)]
        return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, bounds, strict=True)], dim=1)

    def mlp(self, layer: int, x: Tensor, residual: Tensor, w: PartWeights) -> tuple[Tensor, Tensor]:
        """Run the MLP, x and residual [T, hidden] -> (output of the MLP, residual + x)."""
        return self.kernels.mlp_block(x, residual, w)


class MixtureDecoder(Decoder):
    """A decoder in which each token is routed to the experts with the highest scores; some layers may be dense."""

    def mlp(self, layer: int, x: Tensor, residual: Tensor, w: PartWeights) -> tuple[Tensor, Tensor]:
        if layer in self.config.dense_layers:
            return super().mlp(layer, x, residual, w)
        x, residual = self.kernels.add_rms_norm(x, residual, w["mlp_norm"])
        scores = linear(x, w["router"], w.get("router_bias"))  # [T, experts]
        config = self.config
        mixed = w["experts"].mixture(x, scores, config.experts_per_token, config.norm_topk_prob, config.swiglu_limit,
                                     self.local_experts)
        return mixed, residual


def decoder_specs(config: ModelConfig, mlp_specs: Callable[[ModelConfig, int], list[WeightSpec]]) -> WeightSpecs:
    """Return the specs of all parts of a decoder; `mlp_specs(config, layer)` returns those of a layer's MLP."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tied = config.tie_embeddings
    head = [tensor("norm", "model.norm.weight", (config.hidden_size,))]
    if not tied:
        head.append(matrix("lm_head", ("lm_head.weight",), (config.vocab_size,), config.hidden_size))
    specs = {
        "embed": [tensor("embedding", "model.embed_tokens.weight", vocabulary, DENSE if tied else EMBEDDING)],
        **{
            layer_part(layer): attention_specs(config, layer) + mlp_specs(config, layer)
            for layer in range(config.num_layers)
        },
        "head": head,
    }
    quantized = make_format(config.quantization.get("quant_method", "dense"), config.quantization)
    specs = stored_in(specs, quantized.for_linear, Dequantized(quantized))
    # Layers share expert slots, so all experts must have one format.
    formats = {spec.format for listed in specs.values() for spec in listed if spec.experts}
    if len(formats) < 2:
        return specs
    return {part: [replace(spec, format=Dequantized(quantized)) if spec.experts else spec for spec in listed]
            for part, listed in specs.items()}


def attention_specs(config: ModelConfig, layer: int) -> list[WeightSpec]:
    """Return the specs of a layer's attention weights and of its two norms."""
    at = f"model.layers.{layer}."
    hidden = config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (q_rows, kv_rows, kv_rows)
    projections = tuple(f"{at}self_attn.{name}_proj" for name in "qkv")
    specs = [
        tensor("input_norm", f"{at}input_layernorm.weight", (hidden,)),
        *linears("qkv", projections, rows, hidden, config.qkv_bias),
        *linears("o", (f"{at}self_attn.o_proj",), (hidden,), q_rows, config.o_bias),
        tensor("mlp_norm", f"{at}post_attention_layernorm.weight", (hidden,)),
    ]
    if config.qk_norm:
        specs += [tensor(name, f"{at}self_attn.{name}.weight", (config.head_dim,)) for name in ("q_norm", "k_norm")]
    if config.sinks:
        specs.append(tensor("sinks", f"{at}self_attn.sinks", (config.num_heads,)))
    return specs


def mlp_specs(config: ModelConfig, layer: int) -> list[WeightSpec]:
    """Return the specs of a dense gated MLP."""
    at = f"model.layers.{layer}.mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        *linears("gate_up", (f"{at}gate_proj", f"{at}up_proj"), (inner, inner), hidden, config.mlp_bias),
        *linears("down", (f"{at}down_proj",), (hidden,), inner, config.mlp_bias),
    ]


def tensor(name: str, source: str, shape: tuple[int, ...], weight_format: WeightFormat | None = None) -> WeightSpec:
    """Return the spec of a weight that is one checkpoint tensor; `weight_format`: its format if it is a linear."""
    return WeightSpec(name, shape, (Source((source,), (shape[0],)),), weight_format)


def matrix(name: str, sources: tuple[str, ...], rows: tuple[int, ...], columns: int) -> WeightSpec:
    return WeightSpec(name, (sum(rows), columns), (Source(sources, rows),), DENSE)


def linears(name: str, modules: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> list[WeightSpec]:
    """Return the specs of linears that read the same input, fused into one matrix, and of their fused biases."""
    specs = [matrix(name, tuple(f"{module}.weight" for module in modules), rows, columns)]
    if bias:
        sources = (Source(tuple(f"{module}.bias" for module in modules), rows),)
        specs.append(WeightSpec(f"{name}_bias", (sum(rows),), sources))
    return specs


def experts(config: ModelConfig, name: str, shape: tuple[int, int, int], *sources: Source) -> WeightSpec:
    """Return the spec of a stack of linears [experts, out, in]; only the first source may be quantised."""
    quantized = make_format(config.expert_format, config.quantization)
    count = shape[0] if sources[0].per_expert else 1
    names = [name.format(expert=index) for index in range(count) for name in sources[0].names]
    weight_format = quantized.for_experts(names)
    return WeightSpec(name, shape, sources if weight_format == DENSE else sources[:1], weight_format)
