"""The least time of a step on this machine: from the bytes it must read and its FLOPs, at measured rates.

    roofline = Roofline(model_shape(config, specs, "float32"), measure_rates("cpu"))
    roof = roofline.decode(batch=16, context=512)
    print(f"{1 / seconds:.1f} step/s, {roof.percent(seconds):.0f}% of the limit ({roof})")

Weights are read once per step for any batch; a mixture reads the experts that uniform routing would use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillover.plan.rates import Rates
from spillover.plan.shapes import ModelShape
from spillover.units import format_rate

LOGIT_BYTES = 4  # logits are float32 in every engine type


@dataclass(frozen=True)
class Limit:
    """The bytes to move and the FLOPs to compute, independent of a machine."""

    bytes: float
    flops: float
    dtype: str  # type of the FLOPs

    def seconds(self, rates: Rates) -> float:
        return max(self.bytes / rates.memory_read, self.flops / rates.flops(self.dtype))

    def bound(self, rates: Rates) -> str:
        memory = self.bytes / rates.memory_read >= self.flops / rates.flops(self.dtype)
        return "memory" if memory else "compute"

    def __add__(self, other: Limit) -> Limit:
        return Limit(self.bytes + other.bytes, self.flops + other.flops, self.dtype)


@dataclass(frozen=True)
class Roof:
    """A limit on one machine."""

    seconds: float
    tokens: int  # tokens sampled by a decode, or processed by a prefill
    bound: str  # "memory" | "compute"
    limit: Limit

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def percent(self, seconds: float) -> float:
        """Return the limit as a percentage of a measured time; 100 is the roof."""
        return 100 * self.seconds / seconds

    def __str__(self) -> str:
        return f"{format_seconds(self.seconds)}, {format_rate(self.tokens_per_second, 'tok/s')}, {self.bound}-bound"


class Roofline:
    def __init__(self, shape: ModelShape, rates: Rates) -> None:
        self.shape = shape
        self.rates = rates

    def decode(self, batch: int, context: int) -> Roof:
        """Return the limit of a step that decodes `batch` requests with `context` tokens in the cache each."""
        return self.step([(1, context)] * batch, batch)

    def prefill(self, tokens: int, context: int = 0) -> Roof:
        """Return the limit of a step that computes `tokens` of one request's prompt after `context` cached ones."""
        return self.step([(tokens, context)], tokens)

    def step(self, batch: Sequence[tuple[int, int]], tokens: int | None = None) -> Roof:
        """Return the limit of a mixed step of (new tokens, cached tokens); `tokens`: the number used for its rate."""
        limit = step_limit(self.shape, batch)
        count = sum(new for new, _ in batch) if tokens is None else tokens
        return Roof(limit.seconds(self.rates), count, limit.bound(self.rates), limit)

    def generate(self, batch: int, prompt: int, output: int) -> Roof:
        """Return the limit of a batch of `batch` equal requests: one prefill, then `output` - 1 decodes."""
        steps = [self.step([(prompt, 0)] * batch)]
        steps += [self.decode(batch, prompt + drawn) for drawn in range(output - 1)]
        limit = steps[0].limit
        for step in steps[1:]:
            limit += step.limit
        seconds = sum(step.seconds for step in steps)
        memory = sum(step.seconds for step in steps if step.bound == "memory")
        return Roof(seconds, batch * output, "memory" if 2 * memory >= seconds else "compute", limit)


def step_limit(shape: ModelShape, batch: Sequence[tuple[int, int]]) -> Limit:
    """Return the limit of a step. `batch`: (new tokens, cached tokens) of each request; each samples one token."""
    tokens = sum(new for new, _ in batch)
    rows = len(batch)
    read = (
        shape.layer_bytes
        + shape.expert_layers * shape.distinct_experts(tokens) * shape.expert_bytes
        + shape.head_bytes
        + tokens * shape.hidden_size * shape.itemsize  # reads of embedding rows
        + rows * shape.vocab_size * LOGIT_BYTES
        + tokens * shape.kv_token_bytes  # writes of KV
    )
    expert_params = shape.expert_layers * shape.experts_per_token * shape.expert_params
    flops = 2 * (shape.layer_params + expert_params) * tokens + 2 * shape.head_params * rows
    for window, layers in shape.windows:
        for new, context in batch:
            cached = context if window is None else min(context, window - 1)
            read += layers * cached * shape.kv_layer_bytes
            flops += layers * 4 * shape.num_heads * shape.head_dim * keys_seen(new, context, window)
    return Limit(read, flops, shape.dtype)


def keys_seen(new: int, context: int, window: int | None) -> int:
    """Return the number of keys that the new tokens attend to, summed: themselves, and earlier ones in the window."""
    last = context + new
    if window is None or last <= window:
        return (last * (last + 1) - context * (context + 1)) // 2
    growing = max(0, window - context)  # new tokens whose window covers all tokens before them
    return (growing * context + growing * (growing + 1) // 2) + (new - growing) * window


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else (
        f"{seconds * 1e6:.0f} us")
