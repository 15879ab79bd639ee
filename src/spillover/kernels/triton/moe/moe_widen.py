"""Dequantisation of FP8 experts to the activations' type, for steps so large that many tiles would repeat it.

A weight is its code times its block's scale, rounded once, as in formats.fp8_block.dequantize.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.moe.experts import Experts
from spillover.kernels.triton.moe.moe_product import FP8_BLOCK


def allocate_wide(experts: int, hidden: int, inner: int, x: Tensor) -> tuple[Experts, Experts]:
    """Allocate the weights of both products of n experts, in the type of x."""

    def allocate(rows: int, columns: int) -> Experts:
        made = torch.empty(experts, rows, columns, dtype=x.dtype, device=x.device)
        return Experts(Linear(DENSE, LinearShape((rows,), columns), (made,)))

    return allocate(2 * inner, hidden), allocate(hidden, inner)


def widen(first: Experts, second: Experts, wide: tuple[Experts, Experts], slots: Tensor | None = None) -> None:
    """Dequantise both products of every expert into `wide`, which is indexed by expert id.

    `slots` int32 [E]: the slot of each expert, if the stacks are indexed by slot; experts in none (-1) are skipped.
    """
    _widen_stack(first, wide[0], slots)
    _widen_stack(second, wide[1], slots)


def _widen_stack(stack: Experts, wide: Experts, slots: Tensor | None) -> None:
    assert stack.scales is not None
    assert stack.bias is None, "biases lie by slot, not by expert"
    experts, rows, columns = wide.values.shape
    blocks = stack.scales.shape[1], stack.scales.shape[2]
    _widen[(blocks[0] * blocks[1], experts)](
        stack.values, stack.scales, wide.values, slots, rows * columns,
        PART=stack.weight.shape.output_sizes[0],  # rows of each of several matrices that were quantised separately
        COLUMNS=columns, W_STRIDE=stack.values.stride(0), SCALE_STRIDE=stack.scales.stride(0),
        BLOCK=FP8_BLOCK.value, num_warps=8,
    )


@triton.jit
def _widen(
    values_ptr, scales_ptr, wide_ptr, slots_ptr, wide_stride, PART: tl.constexpr, COLUMNS: tl.constexpr,
    W_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Dequantise with one program per block of one expert that shares a scale."""
    expert = tl.program_id(1).to(tl.int64)
    place = expert
    if slots_ptr is not None:
        place = tl.load(slots_ptr + expert).to(tl.int64)
        if place < 0:
            return
    block = tl.program_id(0)
    across: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    down: tl.constexpr = (PART + BLOCK - 1) // BLOCK
    row_block = block // across
    row = row_block % down * BLOCK + tl.arange(0, BLOCK)  # row within its matrix
    column = block % across * BLOCK + tl.arange(0, BLOCK)
    inside = (row < PART)[:, None] & (column < COLUMNS)[None, :]
    at = (row_block // down * PART + row)[:, None] * COLUMNS + column[None, :]
    scale = tl.load(scales_ptr + place * SCALE_STRIDE + block)
    value = tl.load(values_ptr + place * W_STRIDE + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(wide_ptr + expert * wide_stride + at, value.to(wide_ptr.dtype.element_ty), mask=inside)
