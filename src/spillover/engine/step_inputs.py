"""What the host tells the device about a step: written to pinned memory, from which the device brings it.

There are two pinned buffers, so that the next step is written while the last one may still be brought, and one device
buffer, whose addresses recorded graphs rely on: arrays put in the same order with the same room lie in the same place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.kernels.triton.stage import bring

_ALIGNMENT = 16  # bytes
_NUMPY: dict[torch.dtype, Any] = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32,
                                  torch.float64: np.float64}


class StepInputs:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        nbytes = _aligned(nbytes)
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self._pinned = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._host: list[npt.NDArray[np.uint8]] = [buffer.numpy() for buffer in self._pinned]
        self._sent = [torch.cuda.Event() if cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._used = 0
        self._end = 0  # of what was really written

    def begin(self) -> None:
        """Start the next step's inputs; waits if those of the step before last have not been brought."""
        self._turn = 1 - self._turn
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        self._used = self._end = 0

    def put(self, values: Any, dtype: torch.dtype, room: int | None = None) -> int:
        """Appends an array; returns where it begins. `room`: elements to keep for it, more than it has."""
        place, count = self._used, len(values)
        self._end = place + count * dtype.itemsize
        self._host[self._turn][place:self._end].view(_NUMPY[dtype])[:] = values
        self._used = _aligned(place + (count if room is None else room) * dtype.itemsize)
        return place

    def send(self) -> None:
        bring(self._device, self._pinned[self._turn], self._end)
        event = self._sent[self._turn]
        if event is not None:
            event.record()

    def view(self, place: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """An array on the device that was put at `place`."""
        size = math.prod(shape) * dtype.itemsize
        return self._device[place:place + size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
