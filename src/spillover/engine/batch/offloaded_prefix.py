"""Sequences longer than the pool: their oldest blocks stay in host memory and pass through a stage in each layer.

While attention reads one segment of a layer, the device's copier copies the next. If kernels can read host memory,
blocks that have the same layout there as in the pool need no stage: they are read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch.step_result import to_device
from spillover.engine.config import EngineConfig
from spillover.engine.step import StepItem
from spillover.kernels.extents import SEGMENTS, segment_blocks
from spillover.kernels.kv_quant import KVCodec
from spillover.models.config import ModelConfig


def spill_codec(config: EngineConfig, model: ModelConfig, pool: Tensor, block_size: int) -> KVCodec | None:
    """Return the codec that quantises blocks for host memory; None if they keep the type of the pool."""
    if config.spill_dtype in ("auto", config.kv_cache_dtype):
        return None
    return KVCodec(pool.shape[1], model.num_kv_heads, block_size, model.head_dim, pool.dtype, config.spill_dtype,
                   config.kv_cache_dtype)


class SegmentCopier(Protocol):
    """A copier of one layer of offloaded blocks into the stage's buffers."""

    @property
    def in_place(self) -> bool: ...  # whether kernels can also read the blocks in host memory

    def prepare(self, addresses: npt.NDArray[np.int64]) -> None:
        """Prepare blocks that are new since the last step. `addresses`: their host addresses."""

    def begin(self, buffer: int, blocks: Tensor, layer: int, stage: Tensor) -> None:
        """Start to copy a layer of blocks into `stage`, a view of a buffer."""

    def wait(self, buffer: int) -> None:
        """Make the next kernels wait for the last copy into a buffer."""


class OffloadStage:
    """The buffers that segments pass through, reused by all steps. Only one step at a time may use them."""

    def __init__(self, pool: Tensor, block_size: int, copier: Callable[[Tensor, KVCodec | None], SegmentCopier],
                 addresses: Callable[[Sequence[int]], npt.NDArray[np.int64]], codec: KVCodec | None = None) -> None:
        """Make the buffers. `pool` [num_blocks, layers, 2, Hk, size]; `copier`: makes the copier into the buffers;
        `addresses`: returns the addresses of slots of the host tier, which never move; `codec`: the codec of blocks in
        host memory, if they are quantised."""
        self.block_size = block_size
        self.layers = pool.shape[1]
        self.segment_blocks = segment_blocks(block_size, pool.device.type)
        self.buffers = torch.zeros(SEGMENTS, self.segment_blocks, *pool.shape[2:], dtype=pool.dtype, device=pool.device)
        self._copier = copier(self.buffers, codec)
        self.in_place = self._copier.in_place
        self._addresses = addresses
        self._slots: tuple[int, ...] = ()

    def prefix(self, item: StepItem) -> StagedPrefix:
        """Return the offloaded blocks of a request that runs alone, for one step."""
        offloaded = len(item.host_blocks)
        resident = to_device(torch.tensor(item.new_blocks[0][offloaded : -(-item.end // self.block_size)]),
                             self.buffers.device)
        return StagedPrefix(self, self._copier, self._find(item.host_blocks), item.end, resident)

    def _find(self, slots: tuple[int, ...]) -> Tensor:
        """Return the slots' addresses int64 [n], after preparing those that are new since the last step."""
        addresses = self._addresses(slots)
        known = len(self._slots) if slots[:len(self._slots)] == self._slots else 0
        self._copier.prepare(addresses[known:])
        self._slots = slots
        return torch.from_numpy(addresses)


class StagedPrefix:
    """A kernels.batch.OffloadedPrefix that copies the segments of all layers in order through the stage's buffers."""

    def __init__(self, stage: OffloadStage, copier: SegmentCopier, blocks: Tensor, length: int,
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
            # The caller of next() has finished reading the previous segment, whose buffer the next one reuses.
            index = layer * self._segments + segment
            self._begin(index)
            self._begin(index + 1)
            self._copier.wait(index % SEGMENTS)
            yield self._view(index)

    def _begin(self, index: int) -> None:
        if self._begun <= index < self._segments * self._stage.layers:
            self._begun = index + 1
            layer, segment = divmod(index, self._segments)
            first = segment * self._stage.segment_blocks
            blocks = self._blocks[first : first + self._stage.segment_blocks]
            self._copier.begin(index % SEGMENTS, blocks, layer, self._view(index))

    def _view(self, index: int) -> Tensor:
        first = index % self._segments * self._stage.segment_blocks
        count = min(self._stage.segment_blocks, self.num_blocks - first)
        return self._stage.buffers[index % SEGMENTS, :count]
