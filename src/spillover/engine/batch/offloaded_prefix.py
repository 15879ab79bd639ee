"""Sequences longer than the pool: their oldest blocks stay in host memory and pass through a stage in each layer.

While attention reads one segment of a layer, the next is copied: by a thread on the CPU, on a separate stream on CUDA.
The CPU's kernel needs no stage for blocks that host memory has in the same layout as the pool: it reads them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spillover.engine.config import EngineConfig
from spillover.engine.step import StepItem
from spillover.kernels.extents import SEGMENTS, segment_blocks
from spillover.kernels.kv_quant import KVCodec
from spillover.kernels.offload_stage import stage_blocks
from spillover.memory.transfer.cpu_transfers import CpuCopy, CpuTransfers
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority
from spillover.memory.transfer.transfers import Transfers
from spillover.models.config import ModelConfig


def spill_codec(config: EngineConfig, model: ModelConfig, pool: Tensor, block_size: int) -> KVCodec | None:
    """Return the codec that quantises blocks for host memory; None if they keep the type of the pool."""
    if config.spill_dtype in ("auto", config.kv_cache_dtype):
        return None
    return KVCodec(pool.shape[1], model.num_kv_heads, block_size, model.head_dim, pool.dtype, config.spill_dtype,
                   config.kv_cache_dtype)


class OffloadStage:
    """The buffers that segments pass through, reused by all steps. Only one step at a time may use them."""

    def __init__(self, pool: Tensor, block_size: int, transfers: Transfers, codec: KVCodec | None = None) -> None:
        """Make the buffers. `pool` [num_blocks, layers, 2, Hk, size]; `codec`: the codec of blocks in host memory, if
        they are quantised."""
        self.block_size = block_size
        self.layers = pool.shape[1]
        self.segment_blocks = segment_blocks(block_size, pool.device.type)
        self.in_place = pool.is_cpu and codec is None
        self.buffers = torch.zeros(SEGMENTS, self.segment_blocks, *pool.shape[2:], dtype=pool.dtype, device=pool.device)
        self._copier = _copier(transfers, self.buffers, codec)
        self._addresses: tuple[int, ...] = ()

    def prefix(self, item: StepItem) -> StagedPrefix:
        """Return the offloaded blocks of a request that runs alone, for one step."""
        cold = len(item.host_blocks)
        resident = torch.tensor(item.new_blocks[0][cold : -(-item.end // self.block_size)])
        if self.buffers.is_cuda:
            resident = resident.pin_memory().to(self.buffers.device, non_blocking=True)
        return StagedPrefix(self, self._copier, self._find(item.host_blocks), item.end, resident)

    def _find(self, addresses: tuple[int, ...]) -> Tensor:
        """Return the addresses as a tensor, after preparing those that are new since the last step."""
        known = len(self._addresses) if addresses[:len(self._addresses)] == self._addresses else 0
        self._copier.prepare(addresses[known:])
        self._addresses = addresses
        return torch.tensor(addresses, dtype=torch.int64)


class StagedPrefix:
    """A kernels.batch.OffloadedPrefix that copies the segments of all layers in order through the stage's buffers."""

    def __init__(self, stage: OffloadStage, copier: _CpuCopier | _CudaCopier, blocks: Tensor, length: int,
                 resident: Tensor) -> None:
        self.num_blocks = len(blocks)
        self.length = length
        self.resident = resident
        self.addresses = blocks if stage.in_place else None
        self._stage = stage
        self._copier = copier
        self._blocks = blocks
        self._segments = -(-self.num_blocks // stage.segment_blocks)
        self._begun = 0

    def segments(self, layer: int) -> Iterator[Tensor]:
        for segment in range(self._segments):
            # The caller of next() has finished reading the previous piece, whose buffer the next piece reuses.
            piece = layer * self._segments + segment
            self._begin(piece)
            self._begin(piece + 1)
            self._copier.wait(piece % SEGMENTS)
            yield self._view(piece)

    def _begin(self, piece: int) -> None:
        if self._begun <= piece < self._segments * self._stage.layers:
            self._begun = piece + 1
            layer, segment = divmod(piece, self._segments)
            first = segment * self._stage.segment_blocks
            blocks = self._blocks[first : first + self._stage.segment_blocks]
            self._copier.begin(piece % SEGMENTS, blocks, layer, self._view(piece))

    def _view(self, piece: int) -> Tensor:
        first = piece % self._segments * self._stage.segment_blocks
        count = min(self._stage.segment_blocks, self.num_blocks - first)
        return self._stage.buffers[piece % SEGMENTS, :count]


def _copier(transfers: Transfers, buffers: Tensor, codec: KVCodec | None) -> _CpuCopier | _CudaCopier:
    if isinstance(transfers, CudaTransfers):
        return _CudaCopier(transfers, buffers, codec)
    assert isinstance(transfers, CpuTransfers)
    return _CpuCopier(transfers, codec)


class _CpuCopier:
    def __init__(self, transfers: CpuTransfers, codec: KVCodec | None) -> None:
        self._transfers = transfers
        self._codec = codec
        self._copies: list[CpuCopy | None] = [None] * SEGMENTS

    def prepare(self, addresses: Sequence[int]) -> None:
        """Prepare blocks that are new since the last step; nothing to do. `addresses`: their host addresses."""

    def begin(self, buffer: int, blocks: Tensor, layer: int, stage: Tensor) -> None:
        self._copies[buffer] = self._transfers.submit(partial(stage_blocks, blocks, layer, stage, self._codec),
                                                      stage.nbytes, Priority.PREFETCH)

    def wait(self, buffer: int) -> None:
        copy = self._copies[buffer]
        assert copy is not None
        self._transfers.wait(copy)


class _CudaCopier:
    """The copier on CUDA. The host never waits: the streams wait for each other."""

    def __init__(self, transfers: CudaTransfers, buffers: Tensor, codec: KVCodec | None) -> None:
        self._transfers = transfers
        self._codec = None if codec is None else codec.one_layer
        self._device = buffers.device
        self._stream = transfers.stream(Priority.PREFETCH)
        self._copied = [torch.cuda.Event() for _ in range(SEGMENTS)]  # type: ignore[no-untyped-call]
        self._pinned = True
        self._codes: Tensor | None = None
        self._order = torch.arange(buffers.shape[1], device=self._device)
        if self._codec is not None:
            self._codes = torch.zeros(buffers.shape[1], self._codec.slot_bytes, dtype=torch.uint8, device=self._device)

    def prepare(self, addresses: Sequence[int]) -> None:
        self._pinned = self._transfers.pool.pin(addresses) and self._pinned

    def begin(self, buffer: int, blocks: Tensor, layer: int, stage: Tensor) -> None:
        # All kernels that read the buffer so far have been launched on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._codec is None:
            self._copy(blocks, layer, stage)
        else:
            assert self._codes is not None
            codes = self._codes[: len(blocks)]
            self._copy(blocks, layer, codes)
            with torch.cuda.stream(self._stream):
                self._codec.decode_pool(codes, stage.flatten(1).view(torch.uint8), self._order[: len(blocks)])
        self._copied[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def _copy(self, blocks: Tensor, layer: int, target: Tensor) -> None:
        piece = target[0].nbytes
        sources = (blocks.numpy() + layer * piece).astype(np.uint64)
        targets = (target.data_ptr() + np.arange(len(sources)) * piece).astype(np.uint64)
        sizes = np.full(len(sources), piece, dtype=np.uint64)
        self._transfers.queue_copies(targets, sources, sizes, Priority.PREFETCH, self._pinned)
