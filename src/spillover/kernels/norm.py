"""Root-mean-square normalisation, alone and fused with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from spillover.kernels import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [..., D] by its root mean square and multiply by weight [D] -> [..., D]."""
    library = native.library()
    if library is None or not native.serves(x) or weight.dtype is not torch.float32:
        return rms_norm_reference(x, weight, eps)
    *_, d = shape = x.shape
    if len(shape) == 3 and x.stride()[1:] == (d, 1):  # heads that are slices of wider rows
        outer, inner, stride = shape[0], shape[1], x.stride(0)
    else:
        x = x.contiguous()
        outer, inner, stride = x.numel() // d, 1, d
    y = torch.empty(*shape)
    library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), outer, inner, d, stride, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual)."""
    library = native.library()
    if library is None or not native.serves(x) or weight.dtype is not torch.float32:
        return add_rms_norm_reference(x, residual, weight, eps)
    shape = x.shape
    if shape != residual.shape or residual.dtype is not torch.float32:
        raise ValueError(f"x is {tuple(shape)} but the residual {tuple(residual.shape)} {residual.dtype}")
    x, residual = x.contiguous(), residual.contiguous()
    d = shape[-1]
    normed, total = torch.empty(*shape), torch.empty(*shape)
    library.add_rms_norm(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), normed.data_ptr(), total.data_ptr()),
        *(x.numel() // d, d, eps),
    )
    return normed, total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
