"""Bytes and parameters of a model, counted from its configuration and specs; no tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from spillover.kernels.fields import ITEMSIZE
from spillover.models.config import ModelConfig
from spillover.models.groups import layer_groups
from spillover.models.weight_specs import WeightSpecs, is_expert

KV_SCALE_BYTES = 4  # scale of 8-bit KV: one float32 per token, head, and key or value
INT4_SCALE_BYTES = 2  # scale of 4-bit KV: the same in bfloat16


@dataclass(frozen=True)
class ModelShape:
    """The sizes of what a step reads and computes. `params` are parameters of matrices: two FLOPs per token each."""

    dtype: str  # compute type, which is also that of weights that are not kept as stored
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    weights: tuple[tuple[str, int], ...]  # bytes by kind: embedding, attention, mlp, experts, norms, head
    layer_bytes: int  # bytes of all layers without experts, which every step reads
    layer_params: int
    head_bytes: int  # bytes read to compute logits; a tied head is the embedding
    head_params: int
    num_experts: int
    experts_per_token: float  # a mean if a rank has only some of the experts
    expert_layers: int
    expert_bytes: int  # bytes of one expert of one layer
    expert_params: int
    kv_layer_bytes: int  # bytes of KV per token and layer
    windows: tuple[tuple[int | None, int], ...]  # (window, number of layers that have it)
    group_layers: int  # layers in a KV block
    group_windows: tuple[int | None, ...]  # window of each layer group
    scratch_bytes: int  # maximum scratch memory of a linear, in addition to its result; experts are not counted
    expert_scratch_bytes: int  # the same for one linear of an expert, as a CPU multiplies it

    @property
    def weight_bytes(self) -> int:
        return sum(count for _, count in self.weights)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of KV per token in all layers."""
        return self.kv_layer_bytes * sum(layers for _, layers in self.windows)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a KV block: `block_size` tokens in the layers of one group."""
        return self.group_layers * self.kv_layer_bytes * block_size

    def distinct_experts(self, tokens: int) -> float:
        """Return the mean number of experts of a layer that `tokens` use, assuming uniform routing."""
        if self.num_experts == 0:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)


def model_shape(config: ModelConfig, specs: WeightSpecs, dtype: str, kv_dtype: str = "auto") -> ModelShape:
    kinds: Counter[str] = Counter()
    layer_bytes = layer_params = head_bytes = head_params = expert_bytes = expert_params = expert_layers = 0
    for part, weights in specs.items():
        for spec in weights:
            size = spec.nbytes(dtype)
            kinds[weight_kind(part, spec.name)] += size
            if is_expert(spec.name):
                expert_bytes += size
                expert_params += spec.params
            elif part.startswith("layers."):
                layer_bytes += size
                layer_params += spec.params
            elif part == "head" or config.tie_embeddings:
                head_bytes += size
                head_params += spec.params
        expert_layers += any(is_expert(spec.name) for spec in weights)
    copies = max(1, expert_layers * config.num_experts)
    groups = layer_groups(config)
    return ModelShape(
        dtype=dtype,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        weights=tuple(kinds.items()),
        layer_bytes=layer_bytes,
        layer_params=layer_params,
        head_bytes=head_bytes,
        head_params=head_params,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        expert_layers=expert_layers,
        expert_bytes=expert_bytes // copies,
        expert_params=expert_params // copies,
        kv_layer_bytes=kv_layer_bytes(config, dtype, kv_dtype),
        windows=tuple(Counter(config.windows).items()),
        group_layers=len(groups[0].layers),
        scratch_bytes=scratch_bytes(specs, dtype),
        expert_scratch_bytes=scratch_bytes(specs, dtype, experts=True),
        group_windows=tuple(group.window for group in groups),
    )


def scratch_bytes(specs: WeightSpecs, dtype: str, experts: bool = False) -> int:
    """Return the maximum scratch memory of a linear in bytes, in addition to its result, either of experts or of all
    others."""
    return max((spec.format.scratch_bytes(spec.linear, dtype) for listed in specs.values() for spec in listed
                if spec.format is not None and is_expert(spec.name) == experts), default=0)


def kv_layer_bytes(config: ModelConfig, dtype: str, kv_dtype: str = "auto") -> int:
    """Return the bytes of keys and values per token and layer. `kv_dtype`: "auto" is the compute type."""
    if kv_dtype == "auto":
        row = config.head_dim * ITEMSIZE[dtype]
    elif kv_dtype == "int4":
        row = config.head_dim // 2 + INT4_SCALE_BYTES
    else:
        row = config.head_dim + KV_SCALE_BYTES
    return 2 * config.num_kv_heads * row


def weight_kind(part: str, name: str) -> str:
    if part == "embed":
        return "embedding"
    if is_expert(name):
        return "experts"
    if "norm" in name:
        return "norms"
    if part == "head":
        return "head"
    return "attention" if name.split("_")[0] in ("qkv", "o", "sinks") else "mlp"
