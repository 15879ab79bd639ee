"""The queue between the device and the host's worker threads in the middle of a step: one run of pinned memory.

The device posts rows and their experts, the host answers with the outputs of these experts. They synchronise by plain
writes of numbers: a post is complete when POSTED has its number, and answered when DONE has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.kernels.fields import ALIGNMENT, aligned

# Offsets in the header, an int32 [HEADER]. The two numbers are on separate cache lines, as each has one writer.
HEADER = 64
POSTED = 0  # number of the latest post; written last, by the device
DONE = 16  # number of the latest answer; written last, by the host
FAILED = 32  # not zero: the device gave up waiting for an answer, or the host refused a post (REFUSED)
LAYER = 33  # layer of the post
COUNT = 34  # number of pairs of the post
TOKENS = 35  # number of rows of x of the post

# Offsets in the state, an int32 [2] in device memory.
POST_NUMBER = 0  # number of the latest post
GIVEN_UP = 1  # not zero once the device gave up: as FAILED, but quick for the device to read

PAIR = 4  # int32 values of a pair: token, expert, index of the pair, 0


@dataclass(frozen=True)
class QueueLayout:
    """The offsets of the arrays in bytes from the header: pairs int32 [P, 4], x [T, H] and out [P, H] float32."""

    tokens: int  # T, the maximum number of tokens
    pairs: int  # P, the maximum number of pairs
    hidden: int  # H, the size of a row

    @property
    def pairs_at(self) -> int:
        return aligned(HEADER * 4)

    @property
    def x_at(self) -> int:
        return aligned(self.pairs_at + self.pairs * PAIR * 4)

    @property
    def out_at(self) -> int:
        return aligned(self.x_at + self.tokens * self.hidden * 4)

    @property
    def nbytes(self) -> int:
        return aligned(self.out_at + self.pairs * self.hidden * 4)


@dataclass(frozen=True)
class HostExpertQueue:
    """The memory and its arrays. Row i of `out` answers pairs[i]: down(act(gate_up(x[token]))), without its share."""

    layout: QueueLayout
    memory: Tensor  # uint8 [nbytes], pinned if the device is a GPU
    header: Tensor  # int32 [HEADER]
    pairs: Tensor  # int32 [P, 4]: token, expert, index of the pair, 0
    x: Tensor  # float32 [T, H]
    out: Tensor  # float32 [P, H]
    state: Tensor  # int32 [2], on the device

    @staticmethod
    def make(tokens: int, pairs: int, hidden: int, device: torch.device) -> HostExpertQueue:
        layout = QueueLayout(tokens, pairs, hidden)
        # For some sizes the allocator of pinned memory guarantees less than ALIGNMENT, so the start is aligned here.
        room = torch.zeros(layout.nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=device.type == "cuda")
        start = -room.data_ptr() % ALIGNMENT
        memory = room[start : start + layout.nbytes]

        def array(at: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return memory[at : at + rows * columns * 4].view(dtype).view(rows, columns)

        return HostExpertQueue(
            layout, memory, memory[: HEADER * 4].view(torch.int32),
            array(layout.pairs_at, pairs, PAIR, torch.int32),
            array(layout.x_at, tokens, hidden, torch.float32),
            array(layout.out_at, pairs, hidden, torch.float32),
            torch.zeros(2, dtype=torch.int32, device=device),
        )

    @property
    def failed(self) -> bool:
        """Return whether an answer was late or a post refused: results computed since then must not be used."""
        return bool(self._numbers[FAILED])

    @cached_property
    def _numbers(self) -> npt.NDArray[np.int32]:
        """Return the header as a NumPy array, which is quick to read after every step."""
        numbers: npt.NDArray[np.int32] = self.header.numpy()
        return numbers
