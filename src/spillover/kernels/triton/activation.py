"""The gated activations between the two products of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.triton.launch import pdl_options

_BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] for x [T, 2I], the gate in the first half."""
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _gate[(rows, triton.cdiv(width, _BLOCK))](
            x, out, width, BLOCK=_BLOCK, num_warps=4, **pdl_options(x.device, wanted=rows == 1)
        )
    return out


@triton.jit
def _gate(x_ptr, out_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * width + column, result.to(dtype), mask=inside)
