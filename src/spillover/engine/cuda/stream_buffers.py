"""Groups of experts on their way through a few slots of a CUDA device: copied ahead of their use, in a step's order.

Steps with many tokens go through every expert of a layer: those that have no slot stream past, group after group, and
the slots of decoding are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Experts of one layer that pass together."""

    runs: Tensor  # the layer's records at home [experts, bytes]
    experts: tuple[int, ...]

    @property
    def copies(self) -> int:
        return len(_runs(self.experts))


class StreamBuffers:
    def __init__(self, slots: Tensor, size: int) -> None:
        """`slots` [n, bytes], in places of `size` slots each."""
        self._places = [slots[start : start + size] for start in range(0, len(slots) - size + 1, size)]
        self.size = size
        self._stream = torch.cuda.Stream(slots.device) if slots.is_cuda else None  # type: ignore[no-untyped-call]
        self._left: list[torch.cuda.Event | None] = [None] * len(self._places)  # the last use of a place is over
        self._groups: Sequence[Group] = ()
        self._started = self._taken = 0
        self._arrived: list[torch.cuda.Event | None] = []

    @property
    def places(self) -> int:
        return len(self._places)

    def begin(self, groups: Sequence[Group]) -> None:
        """A step's groups, in the order they will be taken in. Also while a graph of the step is recorded: what ran
        before it is not waited for one by one, but as a whole."""
        assert self._taken == len(self._groups), "the step before has not taken all of its groups"
        self._groups, self._started, self._taken, self._arrived = groups, 0, 0, []
        self._left = [None] * len(self._places)
        if self._stream is not None and groups:
            self._stream.wait_stream(torch.cuda.current_stream())
        while self._started < min(len(groups), len(self._places)):
            self._start()

    def take(self) -> int:
        """The place of the next group, once it is there; `leave` it before the next is taken."""
        arrived = self._arrived[self._taken]
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return self._taken % len(self._places)

    def leave(self) -> None:
        if self._stream is not None:
            left: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            left.record()
            self._left[self._taken % len(self._places)] = left
        self._taken += 1
        if self._started < len(self._groups):
            self._start()

    def _start(self) -> None:
        group, place = self._groups[self._started], self._started % len(self._places)
        left, target, arrived = self._left[place], self._places[place], None
        with torch.cuda.stream(self._stream):  # None: where the caller is
            if left is not None and self._stream is not None:
                self._stream.wait_event(left)
            for at, first, count in _runs(group.experts):
                target[at : at + count].copy_(group.runs[first : first + count], non_blocking=True)
            if self._stream is not None:
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._stream)
        self._arrived.append(arrived)
        self._started += 1


def _runs(experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(where, first, count) of experts that follow each other, which one copy takes."""
    runs: list[tuple[int, int, int]] = []
    for at, expert in enumerate(experts):
        if runs and runs[-1][1] + runs[-1][2] == expert:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((at, expert, 1))
    return runs


def grouped(experts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(experts[start : start + size]) for start in range(0, len(experts), size)]
