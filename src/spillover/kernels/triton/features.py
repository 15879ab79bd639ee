"""The operations of kernels.features on a CUDA device, one program per row: the rows that precede those of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.batch import AttentionBatch
from spillover.kernels.features import KeptRows

WARPS = 4


def rows_before(x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        _rows_before[(rows,)](x, kept.rows, batch.rows, batch.positions, batch.query_start, slots, follows, out,
                              kept.per_slot, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=WARPS)
    return out


def keep_rows(x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
    rows, width = x.shape
    if rows:
        _keep_rows[(rows,)](x, kept.rows, batch.rows, batch.positions, batch.seq_lens, slots, kept.per_slot,
                            WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=WARPS)


@triton.jit
def _rows_before(x_ptr, kept_ptr, rows_ptr, positions_ptr, query_start_ptr, slots_ptr, follows_ptr, out_ptr, per_slot,
                 WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    request = tl.load(rows_ptr + row)
    if tl.load(query_start_ptr + request) == row:
        # Adding per_slot first keeps the remainder non-negative at position 0.
        place = tl.load(slots_ptr + request).to(tl.int64) * per_slot
        place += (tl.load(positions_ptr + row) + per_slot - 1) % per_slot
        known = inside & (tl.load(follows_ptr + request) != 0)
        before = tl.load(kept_ptr + place * WIDTH + column, mask=known, other=0.0)
    else:
        before = tl.load(x_ptr + (row - 1) * WIDTH + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, before, mask=inside)


@triton.jit
def _keep_rows(x_ptr, kept_ptr, rows_ptr, positions_ptr, seq_lens_ptr, slots_ptr, per_slot, WIDTH: tl.constexpr,
               PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    request = tl.load(rows_ptr + row)
    position = tl.load(positions_ptr + row)
    if tl.load(seq_lens_ptr + request) - 1 - position < per_slot:
        place = tl.load(slots_ptr + request).to(tl.int64) * per_slot + position % per_slot
        x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0)
        tl.store(kept_ptr + place * WIDTH + column, x, mask=inside)
