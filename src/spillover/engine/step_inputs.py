"""What the host tells the device about a step: written to pinned memory, from which the device brings it.

There are two pinned buffers, so that the next step is written while the last one may still be brought, and one device
buffer, whose addresses recorded graphs rely on: arrays put in the same order with the same room lie in the same place.
Steps of a kind that have most of it in common may keep that, in a form of two buffers of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.kernels.triton.stage import bring

_ALIGNMENT = 16  # bytes
_NUMPY: dict[torch.dtype, Any] = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32,
                                  torch.float64: np.float64}


@dataclass(frozen=True)
class Places:
    """Where a step's arrays lie in the inputs. All but `tiles` are the same for every step of as many rows."""

    rows: int  # T, padding included
    requests: int  # B
    samples: int  # R
    most_samples: int  # that there are places for
    turn: int
    token_ids: int
    positions: int
    uniform: int
    sources: int
    row_of: int
    query_start: int
    seq_lens: int
    slots: int
    temperature: int
    sample_rows: int
    items: tuple[int, ...]  # one a layer group; the count, three numbers of nothing, then the items
    tiles: int
    num_tiles: int  # 0 where no request has several rows


class Form:
    """A step's inputs as they were put, in pinned buffers of their own."""

    def __init__(self, image: npt.NDArray[np.uint8], room: int, cuda: bool) -> None:
        """`room`: bytes to keep for it, more than there were."""
        pinned = [torch.zeros(_aligned(room), dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self.words = [buffer.view(torch.int64) for buffer in pinned]
        self._host: list[npt.NDArray[np.uint8]] = [buffer.numpy() for buffer in pinned]
        for buffer in self._host:
            buffer[:len(image)] = image

    def arrays(self, place: int, dtype: torch.dtype, count: int) -> list[npt.NDArray[Any]]:
        """What was put there, in either buffer."""
        size = count * dtype.itemsize
        return [buffer[place:place + size].view(_NUMPY[dtype]) for buffer in self._host]


class StepInputs:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        nbytes = _aligned(nbytes)
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._words = self._device.view(torch.int64)
        cuda = device.type == "cuda"
        pinned = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._pinned_words = [buffer.view(torch.int64) for buffer in pinned]
        self._host: list[npt.NDArray[np.uint8]] = [buffer.numpy() for buffer in pinned]
        self._sent = [torch.cuda.Event() if cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._cuda = cuda
        self.turn = 0  # the buffer that is written
        self._used = 0
        self._end = 0  # of what was really written

    def begin(self) -> None:
        """Start the next step's inputs; waits if those of the step before last have not been brought."""
        self.turn = 1 - self.turn
        event = self._sent[self.turn]
        if event is not None:
            event.synchronize()
        self._used = self._end = 0

    def put(self, values: Any, dtype: torch.dtype, room: int | None = None) -> int:
        """Appends an array; returns where it begins. `room`: elements to keep for it, more than it has."""
        place, count = self._used, len(values)
        self._end = place + count * dtype.itemsize
        self._host[self.turn][place:self._end].view(_NUMPY[dtype])[:] = values
        self._used = _aligned(place + (count if room is None else room) * dtype.itemsize)
        return place

    def keep(self, more: int) -> Form:
        """What was put since `begin`, with room for so many bytes more behind it."""
        return Form(self._host[self.turn][:self._used], self._used + more, self._cuda)

    def send(self, form: Form | None = None, end: int = 0) -> None:
        """What was put, or else the first bytes of a form."""
        if form is None:
            bring(self._words, self._pinned_words[self.turn], self._end)
        else:
            bring(self._words, form.words[self.turn], end)
        event = self._sent[self.turn]
        if event is not None:
            event.record()

    def view(self, place: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """An array on the device that was put at `place`."""
        size = math.prod(shape) * dtype.itemsize
        return self._device[place:place + size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
