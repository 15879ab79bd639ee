"""The first kernels of a step: copy its inputs from the host, fill in the tokens that the previous step sampled, and
update the block tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
_WORDS = 512  # words of eight bytes that one program copies


def copy_inputs(to: Tensor, pinned: Tensor, nbytes: int) -> None:
    """Copy the first `nbytes` of `pinned`, in host memory, to the device; both are int64. A kernel that reads over the
    link starts sooner after the previous kernel than a copy would, and the next kernel starts sooner after it."""
    words = triton.cdiv(nbytes, 8)
    if words:
        _copy_inputs[(triton.cdiv(words, _WORDS),)](to, pinned, words, WORDS=_WORDS, num_warps=4)


def fill_tokens(token_ids: Tensor, sources: Tensor, drawn: Tensor) -> None:
    """Set token_ids[i] = drawn[sources[i]] where `sources` [T] int32 is not negative."""
    count = token_ids.shape[0]
    if count:
        _fill_tokens[(triton.cdiv(count, _BLOCK),)](token_ids, sources, drawn, count, BLOCK=_BLOCK, num_warps=2)


def update_tables(tables: Tensor, updates: Tensor, most: int) -> None:
    """Set tables.flatten()[index] = block for the updates[0] pairs (index, block) from updates[2] on; at most `most`.

    The number of pairs is on the device, so that a captured graph serves any number of them.
    """
    _update_tables[(triton.cdiv(max(1, most), _BLOCK),)](tables, updates, BLOCK=_BLOCK, num_warps=2)


@triton.jit(do_not_specialize=["words"])
def _copy_inputs(to_ptr, from_ptr, words, WORDS: tl.constexpr):
    i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < words), mask=i < words)


@triton.jit
def _fill_tokens(token_ids_ptr, sources_ptr, drawn_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + i, mask=i < count, other=-1)
    pending = source >= 0
    tl.store(token_ids_ptr + i, tl.load(drawn_ptr + source, mask=pending, other=0), mask=pending)


@triton.jit
def _update_tables(tables_ptr, updates_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < tl.load(updates_ptr)
    index = tl.load(updates_ptr + 2 + 2 * i, mask=real, other=0)
    block = tl.load(updates_ptr + 3 + 2 * i, mask=real, other=0)
    tl.store(tables_ptr + index.to(tl.int64), block, mask=real)
