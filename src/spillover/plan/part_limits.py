"""Limits of the parts of a step: the bytes and FLOPs of each part, which `roofline.step_limit` has as a sum, and
the activations that pass between kernels."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs
from spillover.plan.roofline import Limit, keys_seen
from spillover.plan.shapes import ModelShape, model_shape

QKV, OUT, GATE_UP, DOWN, ROUTER, HEAD = "qkv", "o", "gate_up", "down", "router", "head"
ATTENTION, EXPERTS, NORMS, ROPE_STORE, SAMPLING = "attention", "experts", "norms", "rope and KV store", "sampling"
_LINEARS = (QKV, OUT, GATE_UP, DOWN, ROUTER)  # names of weights in the specs


class PartLimits:
    def __init__(self, config: ModelConfig, specs: WeightSpecs, dtype: str, kv_dtype: str = "auto") -> None:
        self._config = config
        self._shape: ModelShape = model_shape(config, specs, dtype, kv_dtype)
        self._linears = [(spec.name, spec.nbytes(dtype), spec.shape[-2], spec.shape[-1])
                         for part, weights in specs.items() if part.startswith("layers.")
                         for spec in weights if spec.name in _LINEARS]

    def step(self, batch: Sequence[tuple[int, int]]) -> dict[str, Limit]:
        """Return the limit of each part of a step. `batch`: (new tokens, cached tokens) of each request; each samples
        one token."""
        config, shape = self._config, self._shape
        size, hidden, layers = shape.itemsize, shape.hidden_size, config.num_layers
        tokens, rows = sum(new for new, _ in batch), len(batch)
        limits: dict[str, Limit] = {}

        def add(part: str, read: float, flops: float = 0.0) -> None:
            limits[part] = limits.get(part, Limit(0.0, 0.0, shape.dtype)) + Limit(read, flops, shape.dtype)

        for name, weight_bytes, outputs, inputs in self._linears:
            written = outputs // 2 if name == GATE_UP else outputs  # the activation halves the outputs
            add(name, weight_bytes + tokens * (inputs + written) * size, 2.0 * tokens * outputs * inputs)
        add(HEAD, shape.head_bytes + rows * (hidden + shape.vocab_size) * size, 2.0 * shape.head_params * rows)
        add(SAMPLING, rows * shape.vocab_size * size)
        add(NORMS, (2 * layers + 1) * 4 * tokens * hidden * size)  # x and the residual are read and written
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rotated = 2 * (heads + kv_heads) + kv_heads  # heads: queries and keys are read and written, values are read
        add(ROPE_STORE, layers * tokens * (rotated * dim * size + shape.kv_layer_bytes))
        for window, count in shape.windows:
            for new, context in batch:
                cached = context if window is None else min(context, window - 1)
                add(ATTENTION, count * ((cached + new) * shape.kv_layer_bytes + 2 * new * heads * dim * size),
                    4.0 * count * heads * dim * keys_seen(new, context, window))
        if shape.expert_layers:
            params = shape.expert_layers * shape.experts_per_token * shape.expert_params
            add(EXPERTS, shape.expert_layers * (shape.distinct_experts(tokens) * shape.expert_bytes
                                                + 2 * tokens * hidden * size), 2.0 * params * tokens)
        return limits
