"""Placement of weights on a CPU, as planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from spillover.engine.cpu.cpu_experts import CpuExperts, ExpertSlots, InPlaceExperts, SlotExperts
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.elastic import ElasticMemory
from spillover.engine.weights.expert_cache import chosen_policy, filled_cache
from spillover.engine.weights.placed import Parts, PlacedParts, PlacedWeights
from spillover.kernels.formats.base import Linear
from spillover.memory.policies.experts.protocol import GuessingPolicy
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.transfer.transfers import Transfers
from spillover.models.weight_specs import layer_part
from spillover.models.weights import PartWeights
from spillover.plan.placement import WeightPlan


def place_on_cpu(parts: Parts, placement: WeightPlan, policy: str, transfers: Transfers,
                 disk: DiskWeights | None = None, kv_bytes: int = 0,
                 shared: SharedWeights | None = None) -> PlacedWeights:
    """Put parts in host memory, and in an arena of the planned size that stands in for the device, with real copies.
    `kv_bytes`: bytes of KV before the slots. `shared`: the pool that holds the host's parts once for all engines."""
    device = torch.device("cpu")
    placed = PlacedParts(placement, device, transfers, disk, shared)
    layers, quota = placement.slot_layers, placement.quota
    arena: Tensor | None = None
    memory: ElasticMemory | None = None
    for part, weights in parts:
        records = placed.put(part, weights)
        layer = int(part.removeprefix("layers.")) if records is not None else -1
        if records is None or layer not in layers:
            continue
        if arena is None:
            memory = ElasticMemory.make(kv_bytes, len(layers) * quota, records.shape[1], device)
            arena = memory.slots
        first = layers.index(layer) * quota
        arena[first : first + quota].copy_(records[:quota])
    return PlacedWeights(placed, _cpu_experts(placed, arena, policy), memory)


def _cpu_experts(placed: PlacedParts, arena: Tensor | None, policy: str) -> CpuExperts | None:
    record, layers = placed.expert_record, placed.placement.slot_layers
    if record is None or not placed.expert_runs:
        return None
    slots = None
    if arena is not None:
        cache = filled_cache(placed.placement, placed.num_experts, chosen_policy(placed.placement, policy))
        slots = ExpertSlots(cache, record, arena,
                            lambda index, expert: placed.expert_source(layers[index], expert), placed.transfers)
    in_place = []
    for layer in placed.expert_runs:
        if layer in layers:
            assert slots is not None
            guesses = isinstance(slots.cache.policy, GuessingPolicy)
            router = _next_router(placed, layers, layer) if guesses else None
            placed.experts[layer_part(layer)] = SlotExperts(slots, layers.index(layer), router)
        else:
            in_place.append(InPlaceExperts(record, lambda index, layer=layer: placed.expert_bytes(layer, index)))  # type: ignore[misc]
            placed.experts[layer_part(layer)] = in_place[-1]
    return CpuExperts(slots, in_place)


def _next_router(placed: PlacedParts, layers: tuple[int, ...],
                 layer: int) -> Callable[[], tuple[Linear, Tensor | None]] | None:
    index = layers.index(layer) + 1
    if index == len(layers):
        return None
    part = cast(PartWeights, placed.resident[layer_part(layers[index])])
    if "router" not in part:  # streamed through the ring, so not loaded yet
        return None
    return lambda: (part["router"], part.get("router_bias"))
