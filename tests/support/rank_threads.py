"""Ranks as threads of this process: computes with sharded models without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from spillover.models.checkpoint import Checkpoint
from spillover.models.sharding.ranks import sum_in_order
from spillover.models.sharding.shard import Shard
from support.models.paged_model import PagedModel

Made = TypeVar("Made")
DEADLINE = 30.0


class _Meeting:
    """The place where ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=DEADLINE)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x.clone()
        self.barrier.wait()
        found = [each.clone() for each in self.given if each is not None]
        self.barrier.wait()
        return found


class ThreadRanks:
    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = len(meeting.given)
        self.expert_rows = torch.zeros(self.size, dtype=torch.int64)
        self.calls = 0  # number of sums
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls += 1
        return sum_in_order(self._meeting.exchange(self.rank, x))

    def gather(self, x: Tensor) -> list[Tensor]:
        found = self._meeting.exchange(self.rank, x)
        return found if self.rank == 0 else []

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x)[0])


def thread_ranks(size: int) -> list[ThreadRanks]:
    meeting = _Meeting(size)
    return [ThreadRanks(rank, meeting) for rank in range(size)]


def at_once(size: int, work: Callable[[int], Made]) -> list[Made]:
    """Run `work` for all ranks at once and return the results; raise the first error of any rank."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


class ShardedPagedModel:
    """One PagedModel per rank, stepped together."""

    def __init__(self, checkpoint: Checkpoint, size: int, expert_parallel: bool = False) -> None:
        self.ranks = thread_ranks(size)
        self.models = [PagedModel(checkpoint, shard=Shard(rank, size, expert_parallel), ranks=self.ranks[rank])
                       for rank in range(size)]

    @torch.no_grad()
    def step(self, chunks: Mapping[str, list[int]]) -> dict[str, Tensor]:
        def step(rank: int) -> dict[str, Tensor]:
            with torch.no_grad():
                return self.models[rank].step(chunks)

        return at_once(len(self.models), step)[0]
