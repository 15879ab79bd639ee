"""Rotary position embedding in the half-rotation form: dimensions d and d + D/2 are rotated together."""

from __future__ import annotations

import torch
from torch import Tensor

from spillover.kernels import native


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, Hk, D] by cos and sin [P, D/2] at positions [T] -> (q, k). Use only the returned
    tensors: q and k themselves may have been overwritten."""
    library = native.library()
    rows, heads, dim = q.shape
    q_stride, *q_inner = q.stride()
    k_stride, *k_inner = k.stride()
    if (
        library is None
        or not native.serves(q)
        or not q_inner == k_inner == [dim, 1]
        or cos.dtype is not torch.float32
        or not (cos.is_contiguous() and sin.is_contiguous())
    ):
        return rope_reference(q, k, cos, sin, positions)
    library.rope(
        *(q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr()),
        *(rows, heads, k.shape[1], dim // 2, q_stride, k_stride),
    )
    return q, k


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos = cos[positions].unsqueeze(1)  # [T, 1, D/2]
    sin = sin[positions].unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
