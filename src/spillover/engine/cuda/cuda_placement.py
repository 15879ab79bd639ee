"""Places weights on a CUDA device as the plan says: parts, slots, the page table, and the host's share of experts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.engine.config import EngineConfig
from spillover.engine.cuda.calibrate import split_table, streaming_share
from spillover.engine.cuda.expert_arena import ExpertArena
from spillover.engine.cuda.fetched_experts import FetchedExperts
from spillover.engine.cuda.host_share import MAX_STREAMED_TOKENS, HostShare
from spillover.engine.cuda.paged_experts import PagedExperts
from spillover.engine.cuda.policy_thread import PolicyThread
from spillover.engine.cuda.stream_buffers import StreamBuffers
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.elastic import ElasticMemory
from spillover.engine.weights.expert_cache import chosen_policy, filled_cache
from spillover.engine.weights.graph_weights import GraphAware, StreamedLayers
from spillover.engine.weights.placed import Parts, PlacedParts, PlacedWeights
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.host_experts import ExpertLayout, HostExperts
from spillover.kernels.moe.moe import LocalExperts
from spillover.kernels.moe.page_table import PageTable
from spillover.kernels.moe.records import Record
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import layer_part
from spillover.plan.placement import SLOTTED, WeightPlan
from spillover.plan.planner import Plan

log = logging.getLogger("spillover.engine")

LOG_ROWS = 1024  # steps that the routing log holds: the policy thread may lag behind by as many
LITTLE = 8  # minimum stream buffers per group for dividing them among three groups instead of two


CudaExperts = PagedExperts | FetchedExperts  # experts of all layers of `table_layers`, which are numbered from 0


@dataclass(frozen=True)
class CudaLayerExperts:
    """The experts of one layer, with the interface that the model uses."""

    experts: CudaExperts
    layer: int

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        assert local is None, "ranks that deal out experts have all of their own on the device: rank_plan.check_experts"
        return self.experts.mixture(self.layer, x, scores, k, renormalize, limit)


def place_on_cuda(parts: Parts, plan: Plan, config: EngineConfig, model: ModelConfig,
                  disk: DiskWeights | None, transfers: CudaTransfers,
                  shared: SharedWeights | None = None) -> PlacedWeights:
    """Put parts on the device and in host memory, and choose how experts are fetched. `shared`: keeps the weights that
    go to host memory, one copy for all engines."""
    placement, device = plan.placement, torch.device("cuda")
    assert placement is not None
    placed = PlacedParts(placement, device, transfers, disk, shared)
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
            memory = ElasticMemory.make(plan.kv_bytes, sum(quotas) + placement.stream_buffers, records.shape[1], device)
            slots = memory.slots
            if shared is None:
                transfers.pool.expect(records.numel(), len(layers) - index - 1 - len(placement.disk_experts), "weights")
        first = sum(quotas[:index])
        slots[first : first + quotas[index]].copy_(records[: quotas[index]])
        del records
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # frees temporary memory of loading
    experts = None
    if slots is not None:
        experts = _experts(placed, layers, quotas, slots, plan, config, model, transfers)
        for index, layer in enumerate(layers):
            placed.experts[layer_part(layer)] = CudaLayerExperts(experts, index)
    graphs: GraphAware = experts or GraphAware()
    return PlacedWeights(placed, experts, memory, StreamedLayers(graphs) if placed.units else graphs)


def table_layers(placement: WeightPlan) -> tuple[int, ...]:
    """List the layers whose experts are fetched or computed one by one, in the order of the page table."""
    return tuple(layer for layer, where in placement.experts.items() if where in (*SLOTTED, "host"))


def _experts(placed: PlacedParts, layers: Sequence[int], quotas: Sequence[int], slots: Tensor, plan: Plan,
             config: EngineConfig, model: ModelConfig, transfers: CudaTransfers) -> CudaExperts:
    """Choose how experts are fetched: by the host if some are on disk or the strategy is demand, else by the device."""
    placement, record, k = placed.placement, placed.expert_record, model.experts_per_token
    assert record is not None
    arena = ExpertArena(slots, record)
    policy = chosen_policy(placement, config.policy)
    records = [run for layer in layers if (run := placed.expert_runs[layer]) is not None]
    if placement.strategy == "demand" or len(records) < len(layers):
        return FetchedExperts(arena, filled_cache(placement, placed.num_experts, policy),
                              lambda index, expert: placed.expert_bytes(layers[index], expert), transfers.demand)
    table = PageTable.make(quotas, placed.num_experts, max(1, placement.paged_tokens) * k, LOG_ROWS, slots.device,
                           placement.stream_buffers)
    fill_table(table, quotas)
    policy.on_load(len(layers), placed.num_experts, placement.quota)
    table.worth.copy_(torch.tensor([list(policy.worth(layer)) for layer in range(len(layers))]))
    # With three groups, one is being computed, one is loaded and one in flight; few slots are better cut in two.
    group = max(1, placement.stream_buffers // (3 if placement.stream_buffers >= 3 * LITTLE else 2))
    # Paging leaves layers without slots to the host, which rounds sums differently; without `fast` they must stream.
    paged_tokens = placement.paged_tokens if all(quotas) or config.fast else 0
    host = thread = None
    if placement.strategy in ("experts", "host-experts") and config.fast:
        host = _host_share(arena, record, records, slots[len(slots) - group :], quotas, plan, model)
    if placement.strategy == "experts" and config.policy not in ("lru", "static"):
        thread = PolicyThread(policy, table, transfers)
    buffers = StreamBuffers(slots[sum(quotas) :], group, transfers)
    return PagedExperts(arena, table, records, buffers, paged_tokens, k, host, thread)


def _host_share(arena: ExpertArena, record: Record, records: Sequence[Tensor], buffer: Tensor, quotas: Sequence[int],
                plan: Plan, model: ModelConfig) -> HostShare | None:
    """Divide missing experts between the link and the host's cores by measuring both now; return None if the link
    alone is faster. `buffer`: slots to measure copies into."""
    assert plan.placement is not None
    tokens, k, device = max(1, plan.placement.paged_tokens), model.experts_per_token, buffer.device
    layout = ExpertLayout(record, arena.first.weight.format, getattr(torch, plan.dtype), model.hidden_size,
                          model.expert_intermediate_size, records[0].shape[0], model.swiglu_limit)
    cores = HostExperts(layout, [run.data_ptr() for run in records])
    shared = split_table(records, buffer, cores, tokens * k) if any(quotas) else None
    if shared is None and all(quotas):
        cores.close()
        return None
    most = max(tokens, MAX_STREAMED_TOKENS)
    queue = HostExpertQueue.make(most, most * k, model.hidden_size, device)
    everything = torch.arange(tokens * k + 1, dtype=torch.int32, device=device)
    return HostShare(cores, queue, [shared if quota else everything for quota in quotas],
                     streaming_share(records, buffer, cores, k))


def fill_table(table: PageTable, quotas: Sequence[int]) -> None:
    """Enter into the table that the slots of every layer hold its first experts, in order."""
    first = 0
    for layer, quota in enumerate(quotas):
        table.slot_of[layer, :quota] = torch.arange(first, first + quota, dtype=torch.int32)
        table.owner[first : first + quota] = torch.arange(quota, dtype=torch.int32)
        first += quota
