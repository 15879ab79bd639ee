"""KV in four bits, for tiers below the device: rotated along the head dimension, one bfloat16 scale per token and head.

A head of a block is [head_dim / 2, block_size] bytes, keys and values alike, then block_size little-endian bfloat16
scales: half the size of eight bits. Byte (j, t) has dimension 2j of token t in its low four bits and 2j + 1 in its high
ones. value = (code - 7.5) * scale, and scale = the largest magnitude over head_dim / 7.5, rounded to bfloat16.

The rotation is a Hadamard transform, which spreads the few large dimensions of keys over all of them. Its size is the
largest power of two that divides head_dim; it is computed in float32, neighbours first, and not normalised: decoding
divides. A code times its scale is exact in float32, so that a fused multiply-add changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2  # bytes of one scale
LAYOUT = "head:int4-hadamard[dim/2,token],token:bf16-scale"
HALF = 7.5  # the largest code once the codes 0 .. 15 are centred on 0


def chunk_of(head_dim: int) -> int:
    """Return the number of dimensions that are rotated together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate(x: Tensor) -> Tensor:
    """Rotate float32 [..., D, tokens] along D; rotating twice multiplies by chunk_of(D)."""
    shape, chunk, step = x.shape, chunk_of(x.shape[-2]), 1
    while step < chunk:
        pairs = x.reshape(*shape[:-2], shape[-2] // (2 * step), 2, step, shape[-1])
        low, high = pairs.unbind(-3)
        x = torch.stack((low + high, low - high), -3).view(shape)
        step *= 2
    return x


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode [..., D, tokens] -> codes [..., D / 2, tokens] uint8 and scales [..., tokens] bfloat16."""
    x = rotate(x.float())
    top = x.abs().amax(-2)
    scales = (top / torch.full_like(top, HALF)).to(torch.bfloat16)  # for a scalar, CUDA would multiply by 1 / HALF
    steps = scales.float().unsqueeze(-2)
    codes = torch.where(steps > 0, x / steps + 8, 0.0).clamp(0, 15).to(torch.uint8)
    return codes[..., 0::2, :] | codes[..., 1::2, :] << 4, scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values [..., D, tokens] in float32."""
    both = torch.stack((codes & 15, codes >> 4), -2).flatten(-3, -2)  # [..., D, tokens]
    x = rotate((both.float() - HALF) * scales.float().unsqueeze(-2))
    return x * (1 / chunk_of(x.shape[-2]))
