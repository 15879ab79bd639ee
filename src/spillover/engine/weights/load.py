"""Loads a model's weights, or makes dummy weights, and puts them where the plan says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from spillover.engine.backend import Backend
from spillover.engine.config import EngineConfig
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.managed import ManagedWeights
from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.errors import SpilloverError
from spillover.kernels.formats.base import Weight
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.shared_pool.wire import socket_path
from spillover.models.checkpoint import open_checkpoint
from spillover.models.config import ModelConfig
from spillover.models.loader import PartReader, Progress, dummy_parts, load_parts
from spillover.models.quantize.scheme import Scheme
from spillover.models.quantize.view import open_quantized
from spillover.models.sharding.shard import Cuts
from spillover.models.sharding.shard_view import open_shard
from spillover.models.weight_specs import WeightSpec, WeightSpecs, dequantized_experts, is_expert, kept_on
from spillover.plan.planner import Plan
from spillover.units import format_bytes

log = logging.getLogger("spillover.engine")


def load(config: EngineConfig, plan: Plan, model: ModelConfig, specs: WeightSpecs, path: Path, backend: Backend,
         progress: Progress | None = None, scheme: Scheme | None = None, cuts: Cuts | None = None,
         rank: int = 0) -> EngineWeights:
    """Load a model's weights. `scheme`: what they are quantised to while they load; None keeps them as they are in the
    checkpoint. `cuts`: the pieces of weights that a rank has, which `specs` describe; None reads all weights."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    specs = kept_on(specs, plan.device, plan.dtype, not config.fast)
    if (found := dequantized_experts(specs)) is not None:
        log.warning("experts in %s are dequantised to %s: no kernel of this device multiplies with them as they are",
                    found.quant_method, plan.dtype)
    if config.load_format == "dummy":
        parts = dummy_parts(specs, dtype, device, config.seed, rank if cuts else None)
        return _placed(config, plan, model, parts, specs, None, backend)
    if scheme is not None and _on_disk(plan):
        raise SpilloverError(f"--quantization {scheme.kind} quantises weights while they load, and host memory has no "
                             "room for all of them; raise --host-memory, or write them once with `spill quantize`")
    with open_checkpoint(path) if scheme is None else open_quantized(path, scheme, device) as whole:
        checkpoint = open_shard(whole, cuts or {})

        def where(part: str, spec: WeightSpec) -> torch.device:
            return device if _stays(plan, part, spec) else torch.device("cpu")

        parts = load_parts(checkpoint, model, specs, dtype, where, progress=progress)
        return _placed(config, plan, model, parts, specs, None if not _on_disk(plan) else path, backend, cuts)


def _placed(config: EngineConfig, plan: Plan, model: ModelConfig, parts: Iterator[tuple[str, dict[str, Weight]]],
            specs: WeightSpecs, path: Path | None, backend: Backend, cuts: Cuts | None = None) -> EngineWeights:
    """Place the weights. `path`: the checkpoint, given if some weights stay on disk."""
    placement = plan.placement
    if placement is None:
        return FixedWeights(dict(parts))
    if _on_disk(plan) and path is None:
        raise SpilloverError("--load-format dummy has no file for the weights that host memory has no room for; raise "
                             "--host-memory")
    if placement.managed_bytes:
        return ManagedWeights(parts, placement, backend.managed_memory(), torch.device(plan.device))
    disk = None
    if path is not None:
        # The checkpoint stays open as long as the engine runs.
        checkpoint = open_shard(open_checkpoint(path), cuts or {})
        disk = DiskWeights(PartReader(checkpoint, model, specs, getattr(torch, plan.dtype)))
    shared = None
    if config.host_pool is not None and plan.host_weight_bytes:
        shared = SharedWeights(socket_path(config.host_pool), backend.transfers.pool)
    weights = backend.place(parts, model, disk, shared)
    if shared is not None and shared.nbytes:
        log.info("%s of weights are in the shared pool, of which %s were there already",
                 format_bytes(shared.nbytes), format_bytes(shared.found_bytes))
    return weights


def _on_disk(plan: Plan) -> bool:
    return plan.placement is not None and plan.placement.disk_bytes > 0


def _stays(plan: Plan, part: str, spec: WeightSpec) -> bool:
    """Return whether the plan keeps a weight on the device."""
    placement = plan.placement
    if placement is None:
        return True
    if is_expert(spec.name):
        return placement.experts.get(int(part.removeprefix("layers.")), "resident") == "resident"
    return placement.parts.get(part, "resident") == "resident"
