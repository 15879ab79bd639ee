"""Rows of a step beside what each follows: the row before it, or what was kept of its request's last step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch


@dataclass(frozen=True)
class KeptRows:
    """The newest rows of each request, by slot and position."""

    rows: Tensor  # [slots * per_slot, hidden]
    per_slot: int

    def place(self, slot: int, position: int) -> int:
        return slot * self.per_slot + position % self.per_slot


def rows_before(x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
    """Return what each row of x [T, hidden] follows [T, hidden]: the row before, or, for the first of a request, which
    has the slot `slots` [B], what is kept of the position before; zeros where `follows` [B] int32 is 0."""
    request = batch.rows.long()
    place = slots.long()[request] * kept.per_slot + (batch.positions - 1) % kept.per_slot
    first = batch.query_start.long()[request] == torch.arange(len(x))
    known = kept.rows[place] * follows[request].to(x.dtype).unsqueeze(1)
    return torch.where(first.unsqueeze(1), known, x.roll(1, 0))


def keep_rows(x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
    """Keep those of x [T, hidden] that are among the last `per_slot` positions of their request."""
    request = batch.rows.long()
    newest = batch.seq_lens[request] - 1 - batch.positions < kept.per_slot
    place = slots.long()[request] * kept.per_slot + batch.positions % kept.per_slot
    kept.rows[place[newest]] = x[newest]
