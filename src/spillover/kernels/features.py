"""The predecessor of each row of a step: the row before it, or a row kept from the previous step of its request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch


@dataclass(frozen=True)
class KeptRows:
    """The newest rows of each request, by the slot of the request and the position of the row."""

    rows: Tensor  # [slots * per_slot, hidden]
    per_slot: int  # number of rows kept per request

    def place(self, slot: int, position: int) -> int:
        return slot * self.per_slot + position % self.per_slot


def rows_before(x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
    """Return the predecessor [T, hidden] of each row of x [T, hidden]: the row before it, or for the first of a request
    the row kept of the position before, by slot in `slots` [B]; zeros if the request's `follows` [B] int32 is 0."""
    request = batch.rows.long()
    place = slots.long()[request] * kept.per_slot + (batch.positions - 1) % kept.per_slot
    first = batch.query_start.long()[request] == torch.arange(len(x))
    known = kept.rows[place] * follows[request].to(x.dtype).unsqueeze(1)
    return torch.where(first.unsqueeze(1), known, x.roll(1, 0))


def keep_rows(x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
    """Keep the rows of x [T, hidden] that are among the last `per_slot` positions of their request."""
    request = batch.rows.long()
    newest = batch.seq_lens[request] - 1 - batch.positions < kept.per_slot
    place = slots.long()[request] * kept.per_slot + batch.positions % kept.per_slot
    kept.rows[place[newest]] = x[newest]
