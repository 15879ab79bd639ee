"""The ranks of a sharded model as its decoder sees them: sums are added up, logits gathered, tokens told to all."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """A group of ranks, each of which computes its part of every layer, in step with the others.

    All ranks make the same calls in the same order, with tensors of the same shapes. What a call returns depends on
    what the ranks gave and on nothing else: the order of sums is that of the ranks.
    """

    rank: int
    size: int
    expert_rows: Tensor  # int64 [size]: rows that each rank's experts were asked for, where these are dealt out

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, added up in float32 from rank 0 on; x may be overwritten."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' x at rank 0, and nothing at the others."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with rank 0's, at the others."""


class OneRank:
    """A model that is not sharded."""

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
    """Add the parts of all ranks in float32, from rank 0 on, and round once."""
    total = parts[0].float() + parts[1].float()
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)
