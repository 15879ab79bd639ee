"""The backend of the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spillover.engine.backend import Backend, DeviceRunner, RunnerParts
from spillover.engine.cpu.cpu_copier import CpuCopier
from spillover.engine.cpu.cpu_placement import place_on_cpu
from spillover.engine.cpu.cpu_runner import CpuRunner
from spillover.engine.planned import Progress
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.placed import Parts, PlacedWeights
from spillover.kernels.arena import Arena
from spillover.kernels.kv_quant import KVCodec
from spillover.memory.managed.emulated import EmulatedMemory
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_cpu import CpuLink
from spillover.memory.transfer.link_ranks import RankPool, RanksLink
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs


class CpuBackend(Backend):
    transfers: CpuTransfers

    def open(self) -> None:
        self.transfers = CpuTransfers(HostPool(limit=self.plan.host_bytes + self.plan.host_weight_bytes))

    def place(self, parts: Parts, model: ModelConfig, disk: DiskWeights | None,
              shared: SharedWeights | None) -> PlacedWeights:
        assert self.plan.placement is not None
        # Ranks lend no slots to KV, so their KV pools are separate allocations.
        kv_bytes = self.plan.kv_bytes if self.config.tensor_parallel_size == 1 else 0
        return place_on_cpu(parts, self.plan.placement, self.config.policy, self.transfers, disk, kv_bytes, shared)

    def managed_memory(self) -> EmulatedMemory:
        return EmulatedMemory(self.transfers)

    def free_unused(self) -> None:
        """Do nothing: there is no device memory."""

    def allocate_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype in (torch.float32, torch.uint8):
            floats = math.prod(shape) * dtype.itemsize // 4  # the pool's size is a multiple of 4 bytes
            return Arena().empty(floats).zero_().view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self.device).zero_()

    def copier(self, buffers: Tensor, codec: KVCodec | None) -> CpuCopier:
        return CpuCopier(self.transfers, codec)

    def make_runner(self, parts: RunnerParts) -> CpuRunner:
        shared_with = parts.shared_with if isinstance(parts.shared_with, CpuRunner) else None
        return CpuRunner(parts.model, parts.weights, parts.kv, self.plan.block_size, parts.limits, self.transfers,
                         parts.decode, self.plan.kv_cache_dtype, parts.stage, shared_with)

    def capture(self, runner: DeviceRunner, show: Progress, specs: WeightSpecs | None = None) -> None:
        """Do nothing: there are no graphs."""

    def link(self, pool: Tensor, codec: KVCodec | None) -> CpuLink:
        flat = pool.view(-1).view(torch.uint8)
        return CpuLink(flat.numpy().data, pool.stride(0) * pool.itemsize, self.transfers, codec)

    def ranks_link(self, pool: Tensor, held: Sequence[tuple[Tensor, range]], num_heads: int,
                   codec: KVCodec | None) -> RanksLink:
        pools = [RankPool(each.numpy().data, heads) for each, heads in held]
        return RanksLink(pools, 2 * pool.shape[1], num_heads, pool.shape[-1] * pool.itemsize, self.transfers, codec)
