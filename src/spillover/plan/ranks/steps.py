"""What a step takes on n cards: each rank's part at its own roof, and the all-reduces that no rank can start without.

A rank streams weights over its own link, as fast as that is or as its part of the host's memory bandwidth. Launches,
waits and skew between ranks are not counted. Nothing is taken to be hidden behind an all-reduce.
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

REQUESTS = (1, 8, 64)  # of the decode steps that are shown
CONTEXT = PROMPT = 512  # as a plan for one card has them
LONG_PROMPT = 8192
DRAWS = 256  # of random routing, by which the busiest rank's load is known to about a percent


@dataclass(frozen=True)
class StepTime:
    name: str
    tokens: int  # sampled by a decode, or taken in by a prefill
    rank_seconds: float  # what the slowest rank computes, reads and moves
    bound: str  # what binds it: memory, compute, link, host, ...
    all_reduce_seconds: float

    @property
    def seconds(self) -> float:
        return self.rank_seconds + self.all_reduce_seconds

    @property
    def share(self) -> float:
        """Return the part of the step that ranks spend adding up."""
        return self.all_reduce_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank, and what steps of the whole group take."""

    shard: Shard
    plan: Plan
    weight_bytes: int  # on all ranks together
    replicated_bytes: int  # of them what is there more than once, padding included
    stream_rate: float | None  # bytes a second over a rank's link, with its part of the host's bandwidth
    steps: tuple[StepTime, ...]

    @property
    def name(self) -> str:
        return layout_name(self.shard)


def layout_name(shard: Shard) -> str:
    """Name what is planned for, as tables head it."""
    if shard.size == 1:
        return "1 card"
    return f"{shard.size} cards" + (", experts apart" if shard.expert_parallel else "")


def rank_rates(rates: Rates, host: Host, ranks: int) -> Rates:
    """Return the rates of one rank, whose machine is shared by all of them."""
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
    """Predict the steps of a group. `config`, `specs` and `rates` are a rank's, `whole` the model's."""
    times = []
    for name, batch, tokens in _batches(plan):
        seconds, bound = _rank_seconds(shard, plan, config, specs, rates, batch, whole)
        times.append(StepTime(name, tokens, seconds, bound, _all_reduces(shard, plan, link, batch, whole)))
    total = shard.size * plan.weight_bytes
    return RankPlan(shard, plan, total, total - whole_bytes, rates.host_to_device, tuple(times))


def all_reduces(layers: int) -> int:
    """Return how many a step needs: after attention and MLP of every layer, and one of the embedding's rows."""
    return 2 * layers + 1


def busiest(experts: int, k: int, ranks: int, tokens: int) -> float:
    """Return how many of a token's experts the busiest rank computes on average, were routing uniform."""
    draws = max(1, min(DRAWS, (DRAWS * 64) // tokens))
    random = np.random.default_rng(0)
    chosen = random.multivariate_hypergeometric([experts // ranks] * ranks, k, size=(draws, tokens))
    return float(chosen.sum(axis=1).max(axis=1).mean()) / tokens


def _batches(plan: Plan) -> list[tuple[str, list[tuple[int, int]], int]]:
    """Return name, (new tokens, tokens cached before) of each request, and tokens of the steps to show."""
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
    """Return the shape of the busiest rank: of whole experts it has as many as chance gives the least lucky."""
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
