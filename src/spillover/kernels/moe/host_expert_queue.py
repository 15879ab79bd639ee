"""What the device and the host's worker threads write each other in the middle of a step: one run of pinned memory.

The device posts rows and the experts they want, the host answers with what those experts make of them. Both only ever
write numbers here that the other reads: a turn is posted when `posted` shows it, and answered when `done` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.kernels.fields import ALIGNMENT, aligned

# InputOffsets in the header, an int32 [HEADER]. The two turns lie on cache lines of their own: each has one writer.
HEADER = 64
POSTED = 0  # turn of the latest post; written last, by the device
DONE = 16  # turn of the latest answer; written last, by the host
FAILED = 32  # not zero: the device waited for an answer longer than it may, and went on without it
LAYER = 33  # of the post
COUNT = 34  # pairs of the post
TOKENS = 35  # rows of x of the post

# InputOffsets in the state, an int32 [2] in the device's own memory.
TURN = 0  # of the latest post
GIVEN_UP = 1  # as FAILED, where the device finds it quickly

PAIR = 4  # int32 a pair: token, expert, index of the pair, 0


@dataclass(frozen=True)
class MailLayout:
    """Where the arrays begin, in bytes from the header's first: pairs int32 [P, 4], x [T, H] and out [P, H] float32."""

    tokens: int  # T, at most
    pairs: int  # P, at most
    hidden: int  # H

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
    """The memory and its arrays. Row i of `out` answers pairs[i]: down(act(gate_up(x[token]))), not times its share."""

    layout: MailLayout
    memory: Tensor  # uint8 [nbytes], pinned where there is a device
    header: Tensor  # int32 [HEADER]
    pairs: Tensor  # int32 [P, 4]: token, expert, index of the pair, 0
    x: Tensor  # float32 [T, H]
    out: Tensor  # float32 [P, H]
    state: Tensor  # int32 [2], on the device

    @staticmethod
    def make(tokens: int, pairs: int, hidden: int, device: torch.device) -> HostExpertQueue:
        layout = MailLayout(tokens, pairs, hidden)
        # The allocator for pinned memory promises less than ALIGNMENT for some sizes, so the start is looked for.
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
        """Return whether an answer came too late: what was computed since is not to be used."""
        return bool(self._numbers[FAILED])

    @cached_property
    def _numbers(self) -> npt.NDArray[np.int32]:
        """Return the header, for who looks at it after every step."""
        numbers: npt.NDArray[np.int32] = self.header.numpy()
        return numbers
