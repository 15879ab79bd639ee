"""The end of a pass that drafts one token per request: stores the tokens and advances each row by one position."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.triton.attention import ordered_splits

_SIZE = 256
_FIELDS = tl.constexpr(ordered_splits.FIELDS)


def end_pass(ids: Tensor, drafted: Tensor, done: Tensor, counts: Tensor, positions: Tensor, slots: Tensor,
             padding: int, items: Tensor, num_items: Tensor, window: bool) -> None:
    """Store the tokens `ids` [B] in row `done` [1] of `drafted` [passes, most], and update `positions` [B], `slots` [B]
    and the attention items [I, FIELDS] for the next pass.

    A row that has completed its `counts` [B] passes has no space for another key: it continues in the padding slot, and
    its later results are never read.
    """
    _end_pass[(1,)](ids, drafted, done, counts, positions, slots, items, num_items, ids.shape[0], drafted.stride(0),
                    padding, WINDOW=window, SIZE=_SIZE, num_warps=4)


@triton.jit(do_not_specialize=["padding"])
def _end_pass(ids_ptr, drafted_ptr, done_ptr, counts_ptr, positions_ptr, slots_ptr, items_ptr, num_items_ptr, rows,
              stride, padding, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    done = tl.load(done_ptr)
    for start in range(0, rows, SIZE):
        i = start + tl.arange(0, SIZE)
        real = i < rows
        tl.store(drafted_ptr + done * stride + i, tl.load(ids_ptr + i, mask=real), mask=real)
        ended = tl.load(counts_ptr + i, mask=real, other=0) <= done + 1
        position = tl.load(positions_ptr + i, mask=real, other=0)
        tl.store(positions_ptr + i, tl.where(ended, 0, position + 1), mask=real)
        tl.store(slots_ptr + i, padding, mask=real & ended)
    total = tl.load(num_items_ptr)
    for start in range(0, total, SIZE):
        i = start + tl.arange(0, SIZE)
        real = i < total
        item = items_ptr + i * _FIELDS
        row = tl.load(item, mask=real, other=0)
        going = real & (tl.load(counts_ptr + row, mask=real, other=0) > done + 1)
        end = tl.load(item + 3, mask=going, other=0)
        length = tl.load(item + 9, mask=going, other=0)
        tl.store(item + 3, end + 1, mask=going & (end == length))  # the last piece, or the only one
        tl.store(item + 9, length + 1, mask=going)
        if WINDOW:
            tl.store(item + 4, tl.load(item + 4, mask=going, other=0) + 1, mask=going)
    tl.store(done_ptr, done + 1)
