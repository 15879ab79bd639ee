"""Bytes and parameters of a model, counted from its configuration and the list of its weights. No tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from spillover.kernels.extents import CODE_PANEL
from spillover.models.config import ModelConfig
from spillover.models.groups import layer_groups
from spillover.models.weight_specs import ITEMSIZE, WeightSpec, WeightSpecs

KV_SCALE_BYTES = 4  # of quantised KV: a float32 for each token, head, and key or value


@dataclass(frozen=True)
class ModelShape:
    """What a step reads and computes with. `params` are those of matrices: two FLOPs each for every token."""

    dtype: str  # of the engine: weights that are not kept as stored, activations and KV
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    weights: tuple[tuple[str, int], ...]  # bytes by kind: embedding, attention, mlp, experts, norms, head
    layer_bytes: int  # read by every step: all layers, less the experts
    layer_params: int
    head_bytes: int  # read by a step that makes logits; a tied head is the embedding
    head_params: int
    num_experts: int
    experts_per_token: int
    expert_layers: int
    expert_bytes: int  # one expert of one layer
    expert_params: int
    kv_layer_bytes: int  # one token in one layer
    windows: tuple[tuple[int | None, int], ...]  # (window, layers that have it)
    group_layers: int  # layers in a KV block
    group_windows: tuple[int | None, ...]  # one a group of layers

    @property
    def weight_bytes(self) -> int:
        return sum(count for _, count in self.weights)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """One token in all layers."""
        return self.kv_layer_bytes * sum(layers for _, layers in self.windows)

    def block_bytes(self, block_size: int) -> int:
        """One block: `block_size` tokens in the layers of one group."""
        return self.group_layers * self.kv_layer_bytes * block_size

    def distinct_experts(self, tokens: int) -> float:
        """Experts of a layer that `tokens` touch on average, were routing uniform."""
        if self.num_experts == 0:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)


def model_shape(config: ModelConfig, specs: WeightSpecs, dtype: str, panel: int = 1,
                kv_dtype: str = "auto") -> ModelShape:
    """`panel`: rows that packed matrices are padded to a multiple of."""
    itemsize = ITEMSIZE[dtype]
    kinds: Counter[str] = Counter()
    layer_bytes = layer_params = head_bytes = head_params = expert_bytes = expert_params = expert_layers = 0
    for part, weights in specs.items():
        for spec in weights:
            size = padded(spec, panel).nbytes(itemsize)
            kinds[weight_kind(part, spec)] += size
            if is_expert(spec):
                expert_bytes += size
                expert_params += _expert_params(spec)
            elif part.startswith("layers."):
                layer_bytes += size
                layer_params += math.prod(spec.shape) if len(spec.shape) == 2 else 0
            elif part == "head" or config.tie_embeddings:
                head_bytes += size
                head_params += math.prod(spec.shape) if len(spec.shape) == 2 else 0
        expert_layers += any(is_expert(spec) for spec in weights)
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
        group_windows=tuple(group.window for group in groups),
    )


def kv_layer_bytes(config: ModelConfig, dtype: str, kv_dtype: str = "auto") -> int:
    """One token in one layer, keys and values. `kv_dtype`: "auto" is the engine's, "fp8" and "int8" are a byte each."""
    row = config.head_dim * ITEMSIZE[dtype] if kv_dtype == "auto" else config.head_dim + KV_SCALE_BYTES
    return 2 * config.num_kv_heads * row


def is_expert(spec: WeightSpec) -> bool:
    return spec.name.startswith("experts.")


def weight_kind(part: str, spec: WeightSpec) -> str:
    if part == "embed":
        return "embedding"
    if is_expert(spec):
        return "experts"
    if "norm" in spec.name:
        return "norms"
    if part == "head":
        return "head"
    return "attention" if spec.name.split("_")[0] in ("qkv", "o", "sinks") else "mlp"


def padded(spec: WeightSpec, panel: int) -> WeightSpec:
    if not spec.packable:
        return spec
    *stack, rows, columns = spec.shape
    panel = CODE_PANEL if spec.code_bits else panel
    return replace(spec, shape=(*stack, -(-rows // panel) * panel, columns))


def _expert_params(spec: WeightSpec) -> int:
    """Matrix parameters of a whole stack: 4-bit blocks hold two a byte, their scales and biases hold none."""
    if spec.name.endswith(("_scales", "_bias")):
        return 0
    return math.prod(spec.shape) * (2 if spec.name.endswith("_blocks") else 1)
