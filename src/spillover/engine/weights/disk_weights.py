"""Units whose home is the checkpoint on disk, for models that do not fit into host memory either.

They are read when they are needed or just before, converted as at loading, and not cached, which is slow.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from spillover.kernels.moe.records import Record
from spillover.models.loader import PartReader
from spillover.models.weight_specs import is_expert
from spillover.models.weights import split_experts


class DiskWeights:
    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()  # guards the reader, which reuses its buffers
        self.bytes_read = 0

    def unit(self, part: str, own: Record | None, expert: Record | None, experts: int) -> Tensor:
        """Read a unit and return its bytes as a ring buffer holds them."""
        own_size = own.nbytes if own is not None else 0
        run = torch.empty(own_size + (expert.nbytes * experts if expert is not None else 0), dtype=torch.uint8)
        with self._lock:
            weights = self._reader.part(part, lambda name: expert is not None if is_expert(name) else own is not None)
        plain, stacks = split_experts(weights)
        if own is not None:
            own.write(plain, run[:own_size])
        if expert is not None:
            expert.write_stacks(stacks, run[own_size:].view(experts, expert.nbytes))
        self.bytes_read += run.numel()
        return run

    def expert(self, part: str, record: Record, index: int) -> Tensor:
        run = torch.empty(record.nbytes, dtype=torch.uint8)
        with self._lock:
            record.write(self._reader.expert(part, index), run)
        self.bytes_read += run.numel()
        return run
