"""Groups of experts on their way through a few slots of a CUDA device: copied ahead of their use, in a step's order.

Steps with many tokens go through every expert of a layer: those that have no slot stream past, group after group, and
the slots of decoding are left as they are.
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
    """Experts of one layer that pass together."""

    runs: Tensor  # the layer's records at home [experts, bytes]
    experts: tuple[int, ...]

    @property
    def copies(self) -> int:
        return len(_runs(self.experts))


class StreamBuffers:
    def __init__(self, slots: Tensor, size: int, transfers: CudaTransfers | None) -> None:
        """Use `slots` [n, bytes], in places of `size` slots each; `transfers`: None where slots are on a CPU, in
        tests."""
        self._places = [slots[start : start + size] for start in range(0, len(slots) - size + 1, size)]
        self.size = size
        self._transfers = transfers
        self._left: list[torch.cuda.Event | None] = [None] * len(self._places)  # the last use of a place is over
        self._groups: Sequence[Group] = ()
        self._started = self._taken = 0
        self._arrived: list[torch.cuda.Event | None] = []

    @property
    def places(self) -> int:
        return len(self._places)

    def count(self, priority: Priority, nbytes: int) -> None:
        """Count what steps copy, which a CUDA graph may do without the host."""
        if self._transfers is not None:
            self._transfers.queue.count(priority, nbytes)

    def begin(self, groups: Sequence[Group]) -> None:
        """Begin a step with its groups, in the order they will be taken in; also while its CUDA graph is captured. What
        ran before it is not waited for one by one, but as a whole."""
        assert self._taken == len(self._groups), "the step before has not taken all of its groups"
        self._groups, self._started, self._taken, self._arrived = groups, 0, 0, []
        self._left = [None] * len(self._places)
        if self._transfers is not None and groups:
            self._transfers.stream(Priority.PREFETCH).wait_stream(torch.cuda.current_stream())
        while self._started < min(len(groups), len(self._places)):
            self._start()

    def take(self) -> int:
        """Return the place of the next group, once it is there; `leave` it before the next is taken."""
        arrived = self._arrived[self._taken]
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return self._taken % len(self._places)

    def leave(self) -> None:
        if self._transfers is not None:
            self._left[self._taken % len(self._places)] = self._transfers.mark()
        self._taken += 1
        if self._started < len(self._groups):
            self._start()

    def _start(self) -> None:
        group, place = self._groups[self._started], self._started % len(self._places)
        target = self._places[place]
        pairs = [(target[at : at + count], group.runs[first : first + count])
                 for at, first, count in _runs(group.experts)]
        if self._transfers is not None:
            # A CUDA graph repeats these copies: they are counted step by step, by whoever began the step.
            self._arrived.append(self._transfers.start_all(pairs, Priority.PREFETCH, self._left[place], counted=False))
        else:
            for into, source in pairs:
                into.copy_(source)
            self._arrived.append(None)
        self._started += 1


def _runs(experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (where, first, count) of experts that follow each other, which one copy takes."""
    runs: list[tuple[int, int, int]] = []
    for at, expert in enumerate(experts):
        if runs and runs[-1][1] + runs[-1][2] == expert:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((at, expert, 1))
    return runs


def grouped(experts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(experts[start : start + size]) for start in range(0, len(experts), size)]
