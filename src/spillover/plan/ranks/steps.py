"""The time of a step on n cards: each rank's part at its own limit, and the all-reduces that all ranks wait for.

A rank streams weights over its own link, bounded by its share of the host's memory bandwidth. Launches, waits and skew
between ranks are not counted. No work is assumed to overlap with an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spillover.models.config import ModelConfig
from spillover.models.sharding.shard import Shard
from spillover.models.weight_specs import WeightSpecs
from spillover.plan.planner import Plan
from spillover.plan.predict import predict_batch
from spillover.plan.ranks.cards import Host, Link
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roofline
from spillover.plan.shapes import ModelShape, model_shape
from spillover.plan.units import weight_units

REQUESTS = (1, 8, 64)  # numbers of requests of the decode steps to show
CONTEXT = PROMPT = 512  # tokens, as in a plan for one card
LONG_PROMPT = 8192
DRAWS = 256  # samples of random routing, which give the busiest rank's load to about one percent


@dataclass(frozen=True)
class StepTime:
    name: str
    tokens: int  # tokens sampled by a decode, or processed by a prefill
    rank_seconds: float  # time of the slowest rank to compute, read and move its part
    bound: str  # the limit that rank_seconds comes from: memory, compute, link, host, ...
    all_reduce_seconds: float

    @property
    def seconds(self) -> float:
        return self.rank_seconds + self.all_reduce_seconds

    @property
    def share(self) -> float:
        """Return the share of the step that is spent in all-reduces."""
        return self.all_reduce_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank, and the times of steps of the whole group."""

    shard: Shard
    plan: Plan
    weight_bytes: int  # bytes of weights on all ranks together
    replicated_bytes: int  # those of weight_bytes that are replicas or padding
    stream_rate: float | None  # bytes per second over a rank's link, bounded by its share of the host's bandwidth
    steps: tuple[StepTime, ...]

    @property
    def name(self) -> str:
        return layout_name(self.shard)


def layout_name(shard: Shard) -> str:
    """Return the name of a layout for the headings of tables."""
    if shard.size == 1:
        return "1 card"
    return f"{shard.size} cards" + (", experts apart" if shard.expert_parallel else "")


def rank_rates(rates: Rates, host: Host, ranks: int) -> Rates:
    """Return the rates of one rank on a machine that all ranks share."""
    if ranks == 1:
        return rates
    most = host.bandwidth(ranks) / ranks

    def shared(rate: float | None) -> float | None:
        return None if rate is None else min(rate, most)

    def divided(rate: float | None) -> float | None:
        return None if rate is None else rate / ranks

    return replace(rates, host_to_device=shared(rates.host_to_device), device_to_host=shared(rates.device_to_host),
                   kernel_read=shared(rates.kernel_read), host_read=divided(rates.host_read),
                   disk_read=divided(rates.disk_read), disk_write=divided(rates.disk_write))


def make_rank_plan(shard: Shard, plan: Plan, whole_bytes: int, config: ModelConfig, specs: WeightSpecs, rates: Rates,
                   link: Link, whole: ModelConfig) -> RankPlan:
    """Predict the steps of a group. `config`, `specs` and `rates` are those of a rank, `whole` the model's config."""
    times = []
    for name, batch, tokens in _batches(plan):
        seconds, bound = _rank_seconds(shard, plan, config, specs, rates, batch, whole)
        times.append(StepTime(name, tokens, seconds, bound, _all_reduces(shard, plan, link, batch, whole)))
    total = shard.size * plan.weight_bytes
    return RankPlan(shard, plan, total, total - whole_bytes, rates.host_to_device, tuple(times))


def all_reduces(layers: int) -> int:
    """Return the all-reduces per step: after attention and MLP of every layer, and one of the embedding's rows."""
    return 2 * layers + 1


def busiest(experts: int, k: int, ranks: int, tokens: int) -> float:
    """Return the mean number of a token's experts that the busiest rank computes, assuming uniform routing."""
    draws = max(1, min(DRAWS, (DRAWS * 64) // tokens))
    random = np.random.default_rng(0)
    chosen = random.multivariate_hypergeometric([experts // ranks] * ranks, k, size=(draws, tokens))
    return float(chosen.sum(axis=1).max(axis=1).mean()) / tokens


def _batches(plan: Plan) -> list[tuple[str, list[tuple[int, int]], int]]:
    """Return the steps to show: (name, (new tokens, cached tokens) of each request, tokens)."""
    context = min(CONTEXT, plan.max_model_len - 1)
    shown = [(f"Decode, {count} request{'s' * (count > 1)}", [(1, context)] * count, count) for count in REQUESTS
             if count <= plan.max_num_seqs]
    most = min(plan.max_model_len, plan.max_num_batched_tokens)
    prompts = sorted({min(PROMPT, most), min(LONG_PROMPT, most)})
    return shown + [(f"Prefill, {tokens:,} tokens", [(tokens, 0)], tokens) for tokens in prompts]


def _rank_seconds(shard: Shard, plan: Plan, config: ModelConfig, specs: WeightSpecs, rates: Rates,
                  batch: Sequence[tuple[int, int]], whole: ModelConfig) -> tuple[float, str]:
    shape = _loaded(shard, model_shape(config, specs, plan.dtype, plan.kv_cache_dtype), batch, whole)
    if plan.placement is None:
        roof = Roofline(shape, rates).step(batch)
        return roof.seconds, roof.bound
    return predict_batch(plan.placement, weight_units(config, specs, plan.dtype), shape, rates, batch)


def _loaded(shard: Shard, shape: ModelShape, batch: Sequence[tuple[int, int]], whole: ModelConfig) -> ModelShape:
    """Return the shape of the busiest rank: with whole experts, it computes more of them than the average rank."""
    if not shard.expert_parallel or shard.size == 1:
        return shape
    tokens = sum(new for new, _ in batch)
    load = busiest(whole.num_experts, whole.experts_per_token, shard.size, tokens)
    return replace(shape, experts_per_token=min(load, float(shape.num_experts)))


def _all_reduces(shard: Shard, plan: Plan, link: Link, batch: Sequence[tuple[int, int]], whole: ModelConfig) -> float:
    itemsize = 4 if plan.dtype == "float32" else 2
    tokens, rows = sum(new for new, _ in batch), len(batch)
    adding = all_reduces(whole.num_layers) * link.all_reduce(tokens * whole.hidden_size * itemsize, shard.size)
    return adding + link.gather(rows * whole.vocab_size * itemsize, shard.size)
