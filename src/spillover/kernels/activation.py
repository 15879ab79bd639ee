"""The gated activations between the two products of an MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels import native

SWIGLU_ALPHA = 1.702  # factor in the sigmoid of clamped_swiglu, as gpt-oss was trained


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of x [T, 2I], with the gate in the first half."""
    library = native.library()
    if library is None or not native.serves(x):
        return silu_and_mul_reference(x)
    x = x.contiguous()
    rows, width = x.shape
    y = torch.empty(rows, width // 2)
    library.silu_and_mul(x.data_ptr(), y.data_ptr(), rows, width // 2)
    return y


def clamped_swiglu(x: Tensor, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 * gate) [T, I] of x [T, 2I], gate and up interleaved and clamped."""
    library = native.library()
    if library is None or not native.serves(x):
        return clamped_swiglu_reference(x, limit)
    x = x.contiguous()
    rows, width = x.shape
    y = torch.empty(rows, width // 2)
    library.clamped_swiglu(x.data_ptr(), y.data_ptr(), rows, width // 2, limit)
    return y


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu_reference(x: Tensor, limit: float) -> Tensor:
    gate = x[..., 0::2].clamp(max=limit)
    up = x[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))
