"""Buffers of a CUDA device through which groups of experts stream, copied ahead of their use in the order of a step.

Steps with many tokens use every expert of a layer: experts without a slot stream through the buffers, group after
group, and the slots of decode stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority


@dataclass(frozen=True)
class Group:
    """Experts of one layer that are copied and computed together."""

    runs: Tensor  # all records of the layer in host memory, their home [experts, bytes]
    experts: tuple[int, ...]

    @property
    def copies(self) -> int:
        return len(_runs(self.experts))


class StreamBuffers:
    def __init__(self, slots: Tensor, size: int, transfers: CudaTransfers | None) -> None:
        """Divide `slots` [n, bytes] into places of `size` slots each; `transfers`: None in tests, whose slots are on a
        CPU."""
        self._places = [slots[start : start + size] for start in range(0, len(slots) - size + 1, size)]
        self.size = size
        self._transfers = transfers
        self._released: list[torch.cuda.Event | None] = [None] * len(self._places)  # end of the last use of each place
        self._groups: Sequence[Group] = ()
        self._started = self._taken = 0
        self._arrived: list[torch.cuda.Event | None] = []

    @property
    def places(self) -> int:
        return len(self._places)

    def count(self, priority: Priority, nbytes: int, copies: int) -> None:
        """Count what steps copy: a replayed CUDA graph copies without the host."""
        if self._transfers is not None:
            self._transfers.queue.count(priority, nbytes, copies)

    def begin(self, groups: Sequence[Group]) -> None:
        """Begin a step with its groups, in the order in which `acquire` will return them; also during capture of its
        CUDA graph. Copies wait for all earlier work at once, not for the last use of each place."""
        assert self._taken == len(self._groups), "the step before has not taken all of its groups"
        self._groups, self._started, self._taken, self._arrived = groups, 0, 0, []
        self._released = [None] * len(self._places)
        if self._transfers is not None and groups:
            self._transfers.stream(Priority.PREFETCH).wait_stream(torch.cuda.current_stream())
        while self._started < min(len(groups), len(self._places)):
            self._start()

    def acquire(self) -> int:
        """Return the place of the next group, after its copy in stream order; call `release` before the next call."""
        arrived = self._arrived[self._taken]
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return self._taken % len(self._places)

    def release(self) -> None:
        if self._transfers is not None:
            self._released[self._taken % len(self._places)] = self._transfers.record_event()
        self._taken += 1
        if self._started < len(self._groups):
            self._start()

    def _start(self) -> None:
        group, place = self._groups[self._started], self._started % len(self._places)
        target = self._places[place]
        pairs = [(target[at : at + count], group.runs[first : first + count])
                 for at, first, count in _runs(group.experts)]
        if self._transfers is not None:
            # A CUDA graph repeats these copies, so the caller of `begin` counts them for every step.
            after = self._released[place]
            self._arrived.append(self._transfers.start_all(pairs, Priority.PREFETCH, after, counted=False))
        else:
            for into, source in pairs:
                into.copy_(source)
            self._arrived.append(None)
        self._started += 1


def _runs(experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (index in the group, first expert, count) of each run of consecutive experts; one copy moves a run."""
    runs: list[tuple[int, int, int]] = []
    for at, expert in enumerate(experts):
        if runs and runs[-1][1] + runs[-1][2] == expert:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((at, expert, 1))
    return runs


def grouped(experts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(experts[start : start + size]) for start in range(0, len(experts), size)]
