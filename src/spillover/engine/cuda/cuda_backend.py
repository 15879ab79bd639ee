"""The backend of CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spillover.engine.backend import Backend, DeviceRunner, RunnerParts
from spillover.engine.cuda.cuda_copier import CudaCopier
from spillover.engine.cuda.cuda_placement import place_on_cuda
from spillover.engine.cuda.cuda_runner import CudaRunner
from spillover.engine.cuda.managed_memory import CudaManagedMemory
from spillover.engine.parallel.rank_codec import RankCodec
from spillover.engine.planned import Progress
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.placed import Parts, PlacedWeights
from spillover.kernels.formats.base import Target
from spillover.kernels.kv_quant import KVCodec
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.transfer.cuda_driver import CudaPinner
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_cuda import CudaLink
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs, kept_on, prepare_products
from spillover.progress import CAPTURING


class CudaBackend(Backend):
    transfers: CudaTransfers

    def open(self) -> None:
        limit = self.plan.host_bytes + self.plan.host_weight_bytes
        self.transfers = CudaTransfers(self.device, HostPool(CudaPinner(torch.cuda.current_device()), limit))

    def place(self, parts: Parts, model: ModelConfig, disk: DiskWeights | None,
              shared: SharedWeights | None) -> PlacedWeights:
        return place_on_cuda(parts, self.plan, self.config, model, disk, self.transfers, shared)

    def managed_memory(self) -> CudaManagedMemory:
        return CudaManagedMemory(self.transfers, self.plan.device_bytes - self.plan.device_weight_bytes,
                                 self.config.uvm_oversubscribe)

    def free_unused(self) -> None:
        torch.cuda.empty_cache()

    def allocate_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).zero_()

    def copier(self, buffers: Tensor, codec: KVCodec | None) -> CudaCopier:
        return CudaCopier(self.transfers, buffers, codec)

    def make_runner(self, parts: RunnerParts) -> CudaRunner:
        shared_with = parts.shared_with if isinstance(parts.shared_with, CudaRunner) else None
        return CudaRunner(parts.model, parts.weights, parts.kv, self.plan.block_size, self.device, parts.limits,
                          self.transfers, parts.decode, self.plan.kv_cache_dtype, parts.stage,
                          not self.config.enforce_eager, shared_with)

    def capture(self, runner: DeviceRunner, show: Progress, specs: WeightSpecs | None = None) -> None:
        if self.config.graph_capture != "start":
            return
        if specs is not None:
            show(0, 0, CAPTURING)
            kept = kept_on(specs, self.plan.device, self.plan.dtype, not self.config.fast)
            prepare_products(kept, Target(self.plan.dtype, self.device), self.plan.max_num_batched_tokens)
        assert isinstance(runner, CudaRunner)
        runner.capture(lambda done, total: show(done, total, CAPTURING))

    def link(self, pool: Tensor, codec: KVCodec | None) -> CudaLink:
        return CudaLink(pool, self.transfers, codec)

    def ranks_link(self, pool: Tensor, held: Sequence[tuple[Tensor, range]], num_heads: int,
                   codec: KVCodec | None) -> CudaLink:
        rows, head_bytes = 2 * pool.shape[1], pool.shape[-1] * pool.itemsize
        parts = [(each[:len(pool) * rows * len(heads) * head_bytes].view(len(pool), rows, len(heads), head_bytes),
                  heads) for each, heads in held]
        return CudaLink(pool, self.transfers, RankCodec(parts, num_heads, codec))
