"""Weights placed on a CUDA device as the plan says: parts, slots, page table, and who computes what is missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from spillover.engine.config import EngineConfig
from spillover.engine.cuda.calibrate import split_table, streaming_share
from spillover.engine.cuda.cuda_experts import HOSTED_TOKENS, Arena, CudaExperts, CudaLayerExperts
from spillover.engine.cuda.policy_thread import PolicyThread
from spillover.engine.cuda.stream_buffers import StreamBuffers
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.elastic import ElasticMemory
from spillover.engine.weights.expert_cache import chosen_policy, filled_cache
from spillover.engine.weights.host_weights import HostWeights
from spillover.engine.weights.mover import CudaMover
from spillover.engine.weights.placed import Parts, PlacedParts, PlacedWeights
from spillover.kernels.experts import expert_stacks
from spillover.kernels.host_expert_queue import HostExpertQueue
from spillover.kernels.host_experts import ExpertLayout, HostExperts
from spillover.kernels.page_table import PageTable
from spillover.kernels.records import Record
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import layer_part
from spillover.models.weights import PartWeights
from spillover.plan.placement import SLOTTED, WeightPlan
from spillover.plan.planner import Plan

log = logging.getLogger("spillover.engine")

LOG_ROWS = 1024  # steps that the policy may be behind
LITTLE = 8  # experts of a group that is not worth being cut smaller


def place_on_cuda(parts: Parts, plan: Plan, config: EngineConfig, model: ModelConfig,
                  disk: DiskWeights | None) -> PlacedWeights:
    placement, device = plan.placement, torch.device("cuda")
    assert placement is not None
    placed = PlacedParts(placement, device, HostWeights(device), disk)
    layers = table_layers(placement)
    quotas = [placement.quota if placement.experts[layer] in SLOTTED else 0 for layer in layers]
    slots: Tensor | None = None
    memory: ElasticMemory | None = None
    for part, weights in parts:
        records = placed.put(part, weights)
        del weights
        layer = int(part.removeprefix("layers.")) if records is not None else -1
        if records is None or layer not in layers:
            continue
        index = layers.index(layer)
        if slots is None:
            memory = ElasticMemory.make(plan.kv_bytes, sum(quotas) + placement.transit, records.shape[1], device)
            slots = memory.slots
            placed.home.expect(records.numel(), len(layers) - index - 1 - len(placement.disk_experts))
        first = sum(quotas[:index])
        slots[first : first + quotas[index]].copy_(records[: quotas[index]])
        del records
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what loading left behind
    experts = None
    if slots is not None:
        experts = _experts(placed, layers, quotas, slots, plan, config, model)
        for index, layer in enumerate(layers):
            placed.paged[layer_part(layer)] = CudaLayerExperts(experts, index)
    return PlacedWeights(placed, CudaMover(device), experts, memory)


def table_layers(placement: WeightPlan) -> tuple[int, ...]:
    """Layers whose experts are fetched or computed one by one, in the order of the page table."""
    return tuple(layer for layer, where in placement.experts.items() if where in (*SLOTTED, "host"))


def _experts(placed: PlacedParts, layers: Sequence[int], quotas: Sequence[int], slots: Tensor, plan: Plan,
             config: EngineConfig, model: ModelConfig) -> CudaExperts:
    placement, record = placed.placement, placed.expert_record
    assert record is not None
    k = model.experts_per_token
    arena = Arena(slots, *expert_stacks(cast(PartWeights, record.stacks(slots))))
    table = PageTable.make(quotas, placed.num_experts, max(1, placement.paged_tokens) * k, LOG_ROWS, slots.device)
    fill_table(table, quotas)
    # Of three groups one is computed, one is there and one on its way; little room is better cut in two.
    group = max(1, placement.transit // (3 if placement.transit >= 3 * LITTLE else 2))
    runs = [placed.expert_runs[layer] for layer in layers]
    # Layers without a slot are the host's, whose sums are rounded otherwise: where that matters they stream past.
    paged_tokens = placement.paged_tokens if all(quotas) or not config.deterministic else 0
    experts = CudaExperts(arena, table, [run if run is not None else torch.empty(0) for run in runs],
                          StreamBuffers(slots[sum(quotas) :], group), sum(quotas), paged_tokens, k)
    policy = chosen_policy(placement, config.policy)
    if placement.strategy == "demand" or any(run is None for run in runs):
        experts.fetch_on_demand(filled_cache(placement, placed.num_experts, policy),
                                lambda index, expert: placed.expert_bytes(layers[index], expert))
        return experts
    policy.on_load(len(layers), placed.num_experts, placement.quota)
    table.worth.copy_(torch.tensor([list(policy.worth(layer)) for layer in range(len(layers))]))
    if placement.strategy == "experts" and config.policy not in ("lru", "static"):
        experts.thread = PolicyThread(policy, table)
    if placement.strategy in ("experts", "host-experts") and not config.deterministic:
        _delegate(experts, record, [run for run in runs if run is not None], quotas, plan, model)
    return experts


def _delegate(experts: CudaExperts, record: Record, runs: Sequence[Tensor], quotas: Sequence[int], plan: Plan,
              model: ModelConfig) -> None:
    """What is missing is shared between the link and the host's cores as measured here and now."""
    assert plan.placement is not None
    tokens, k = max(1, plan.placement.paged_tokens), model.experts_per_token
    layout = ExpertLayout(record, experts.arena.first.weight.format, getattr(torch, plan.dtype), model.hidden_size,
                          model.expert_intermediate_size, runs[0].shape[0], model.swiglu_limit)
    host = HostExperts(layout, [run.data_ptr() for run in runs])
    most = max(tokens, HOSTED_TOKENS)
    mail = HostExpertQueue.make(most, most * k, model.hidden_size, experts.arena.slots.device)
    everything = torch.arange(tokens * k + 1, dtype=torch.int32, device=experts.arena.slots.device)
    shared = split_table(experts, host, tokens * k) if any(quotas) else None
    if shared is None and all(quotas):  # the link alone is faster
        host.close()
        return
    experts.delegate(host, mail, [shared if quota else everything for quota in quotas],
                     streaming_share(experts, host, k))


def fill_table(table: PageTable, quotas: Sequence[int]) -> None:
    """The first experts of every layer lie in its slots, in order."""
    first = 0
    for layer, quota in enumerate(quotas):
        table.slot_of[layer, :quota] = torch.arange(first, first + quota, dtype=torch.int32)
        table.owner[first : first + quota] = torch.arange(quota, dtype=torch.int32)
        first += quota
