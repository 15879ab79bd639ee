"""Copies offloaded blocks to a CUDA device for attention, on a separate stream."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.kernels.extents import SEGMENTS
from spillover.kernels.kv_quant import KVCodec
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority


class CudaCopier:
    """A batch.offloaded_prefix.SegmentCopier. The host never waits: the streams wait for each other."""

    in_place = False

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

    def prepare(self, addresses: npt.NDArray[np.int64]) -> None:
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
        layer_bytes = target[0].nbytes
        sources = (blocks.numpy() + layer * layer_bytes).astype(np.uint64)
        targets = (target.data_ptr() + np.arange(len(sources)) * layer_bytes).astype(np.uint64)
        sizes = np.full(len(sources), layer_bytes, dtype=np.uint64)
        self._transfers.queue_copies(targets, sources, sizes, Priority.PREFETCH, self._pinned)
