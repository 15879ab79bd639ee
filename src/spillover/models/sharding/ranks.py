"""The ranks of a sharded model as its decoder uses them: all-reduce, gather of logits, broadcast of tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """The collective operations of a group of ranks, each of which computes its part of every layer.

    All ranks must make the same calls in the same order, with tensors of the same shapes. Results are deterministic:
    they depend only on the inputs, as sums are added in the order of the ranks.
    """

    rank: int
    size: int
    expert_rows: Tensor  # int64 [size]: number of rows routed to each rank's experts, with expert parallelism

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, added in float32 in the order of ranks; x may be overwritten."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' x at rank 0, and an empty list at the others."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with rank 0's at all other ranks."""


class OneRank:
    """The single rank of a model that is not sharded."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.expert_rows = torch.zeros(1, dtype=torch.int64)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor) -> None:
        pass


ONE_RANK = OneRank()


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Add the parts of all ranks in float32, in the order of ranks, and round once."""
    total = parts[0].float() + parts[1].float()
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)
