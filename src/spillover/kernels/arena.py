"""Memory for tensors that stay on a CPU and are read at every step: weights and the KV pool."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spillover.kernels.huge_pages import map_pages

CHUNK = 64 << 20  # minimum bytes of a chunk
_LINE = 64  # alignment of tensors in bytes, for vector loads


class Arena:
    """An allocator that places float32 tensors one after another in chunks; a chunk is freed with its last tensor."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0)
        self._used = 0  # number of elements allocated in the chunk

    def empty(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if self._used + count > self._chunk.numel():
            self._chunk, self._used = torch.frombuffer(map_pages(max(CHUNK, count * 4)), dtype=torch.float32), 0
        tensor = self._chunk[self._used : self._used + count].view(shape)
        self._used += -(-count * 4 // _LINE) * _LINE // 4
        return tensor
