"""The inputs of a step on a CUDA device: the host writes them to pinned memory, from which the device copies them.

There are two pinned buffers, so that the next step can be written while the last one is still being copied, and one
device buffer, whose addresses captured graphs rely on: the arrays of steps of one shape have the same offsets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch.request_table import BlockUpdates
from spillover.engine.batch.step_layout import ARRAYS, StepArrays
from spillover.kernels.triton.attention import ordered_splits
from spillover.kernels.triton.step_upload import copy_inputs

_ALIGNMENT = 16  # bytes
_TORCH: dict[Any, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32,
                                  np.float64: torch.float64}
HEADER = 4  # numbers before a layer group's attention work: the number of pieces, and three zeros


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step's arrays: those of the step itself, or larger ones that it is padded to for a captured graph."""

    rows: int  # number of rows, T
    requests: int  # number of requests, B
    samples: int  # number of rows that are sampled from, R
    tiles: int = 0  # number of attention tiles, for requests with several rows
    padding_rows: int = 1  # maximum number of rows of a padding request
    short: int = 0  # number of attention items, for requests with a few rows

    @staticmethod
    def decodes(size: int) -> StepShape:
        """Return the shape of a step of `size` requests, padding included, that all decode one token."""
        return StepShape(size, size, size)


@dataclass(frozen=True)
class InputOffsets:
    """Byte offsets, within the inputs, of the arrays of steps of one shape."""

    shape: StepShape
    arrays: dict[str, int]  # offset by name of the StepArrays field
    result_row: int  # offset of the number that says which row of the results the step's tokens go to
    tiles: int  # offset of the attention tiles
    short: tuple[int, ...]  # offset of the attention pieces of requests with a few rows, per layer group
    work: tuple[int, ...]  # offset of the attention pieces of requests with one row, per layer group
    work_size: int  # capacity of each entry of `work`, in int32 numbers
    end: int  # total bytes

    @staticmethod
    def of(shape: StepShape, groups: int, longest: int, kv_heads: int) -> InputOffsets:
        """Lay out the arrays of a shape. `longest`: maximum number of tokens of a request."""
        sizes = {"T": shape.rows, "B": shape.requests, "B+1": shape.requests + 1, "R": shape.samples}
        end, arrays = _ALIGNMENT, {}
        for name, (dtype, size) in ARRAYS.items():
            arrays[name] = end
            end = aligned(end + sizes[size] * np.dtype(dtype).itemsize)
        tiles, end = end, aligned(end + 8 * shape.tiles)
        short_bytes = aligned(4 * (HEADER + ordered_splits.FIELDS * shape.short)) if shape.short else 0
        short = tuple(end + group * short_bytes for group in range(groups))
        end += groups * short_bytes
        work_size = HEADER + ordered_splits.FIELDS * ordered_splits.max_splits(shape.requests, longest, kv_heads)
        work = tuple(end + group * aligned(4 * work_size) for group in range(groups))
        return InputOffsets(shape, arrays, 0, tiles, short, work, work_size, end + groups * aligned(4 * work_size))

    def size(self, name: str) -> int:
        sizes = {"T": self.shape.rows, "B": self.shape.requests, "B+1": self.shape.requests + 1,
                 "R": self.shape.samples}
        return sizes[ARRAYS[name][1]]


class PinnedPair:
    """Two pinned buffers of one size, written alternately."""

    def __init__(self, nbytes: int, cuda: bool) -> None:
        pinned = [torch.zeros(aligned(nbytes), dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self.words = [buffer.view(torch.int64) for buffer in pinned]
        self._host: list[npt.NDArray[np.uint8]] = [buffer.numpy() for buffer in pinned]

    def array(self, buffer: int, place: int, count: int, dtype: Any = np.int32) -> npt.NDArray[Any]:
        return self._host[buffer][place:place + count * np.dtype(dtype).itemsize].view(dtype)

    def arrays(self, buffer: int, offsets: InputOffsets) -> StepArrays:
        return StepArrays(**{name: self.array(buffer, place, offsets.size(name), ARRAYS[name][0])
                             for name, place in offsets.arrays.items()})

    def write_pieces(self, buffer: int, place: int, pieces: npt.NDArray[np.int32]) -> int:
        """Write a header with the number of attention pieces, then the pieces; return the offset of their end."""
        written = self.array(buffer, place, HEADER + pieces.size)
        written[:HEADER] = (len(pieces), 0, 0, 0)
        written[HEADER:] = pieces.ravel()
        return place + written.nbytes


class StepInputs:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.pinned = PinnedPair(nbytes, self.cuda)
        self.buffer = 0  # index of the buffer of each pair that is being written
        self._device = torch.zeros(aligned(nbytes), dtype=torch.uint8, device=device)
        self._words = self._device.view(torch.int64)
        self._sent = [torch.cuda.Event() if self.cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start the next step's inputs; wait if those of the step before last have not been copied yet."""
        self.buffer = 1 - self.buffer
        event = self._sent[self.buffer]
        if event is not None:
            event.synchronize()

    def send(self, pair: PinnedPair, end: int) -> None:
        """Copy the first `end` bytes of a pair's current buffer to the device."""
        copy_inputs(self._words, pair.words[self.buffer], end)
        event = self._sent[self.buffer]
        if event is not None:
            event.record()

    def view(self, place: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the array on the device at byte offset `place`."""
        size = math.prod(shape) * dtype.itemsize
        return self._device[place:place + size].view(dtype).view(shape)

    def array(self, offsets: InputOffsets, name: str) -> Tensor:
        """Return the device copy of one field of StepArrays."""
        return self.view(offsets.arrays[name], _TORCH[ARRAYS[name][0]], offsets.size(name))


def table_updates(updates: BlockUpdates) -> npt.NDArray[np.int32]:
    """Return block table updates in the format that kernels.triton.step_upload.update_tables reads."""
    count = len(updates.blocks)
    numbers = np.empty(2 + 2 * count, dtype=np.int32)
    numbers[0], numbers[1] = count, 0
    numbers[2::2], numbers[3::2] = updates.places, updates.blocks
    return numbers


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
