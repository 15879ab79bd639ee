"""Copies offloaded blocks for attention if the device is the CPU: on a separate thread."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from spillover.kernels.extents import SEGMENTS
from spillover.kernels.kv_quant import KVCodec
from spillover.kernels.offload_stage import stage_blocks
from spillover.memory.transfer.cpu_transfers import CpuCopy, CpuTransfers
from spillover.memory.transfer.link_queue import Priority


class CpuCopier:
    """A batch.offloaded_prefix.SegmentCopier."""

    def __init__(self, transfers: CpuTransfers, codec: KVCodec | None) -> None:
        self._transfers = transfers
        self._codec = codec
        self.in_place = codec is None
        self._copies: list[CpuCopy | None] = [None] * SEGMENTS

    def prepare(self, addresses: npt.NDArray[np.int64]) -> None:
        """Do nothing: the copy thread reads any host memory."""

    def begin(self, buffer: int, blocks: Tensor, layer: int, stage: Tensor) -> None:
        self._copies[buffer] = self._transfers.submit(partial(stage_blocks, blocks, layer, stage, self._codec),
                                                      stage.nbytes, Priority.PREFETCH)

    def wait(self, buffer: int) -> None:
        copy = self._copies[buffer]
        assert copy is not None
        self._transfers.wait(copy)
