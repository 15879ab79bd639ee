"""OCP MXFP4: 32 four-bit floats (E2M1) share one power-of-two scale (E8M0), the low nibble first."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # values a scale
MAX_EXPONENT = 2  # of the largest E2M1 value, 6 = 1.5 * 2**2
SCALE_BIAS = 127
SCALE_PADDING = 4  # rows of scales are padded to a multiple of it, so that a kernel reads whole words
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def padded(groups: int) -> int:
    """Scales that a row takes in memory, of which `groups` mean something."""
    return -(-groups // SCALE_PADDING) * SCALE_PADDING


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G or padded(G)] -> [..., G * 32]."""
    pairs, powers = _tables(blocks.device)
    values = F.embedding(blocks.int(), pairs).flatten(-2)  # [..., G, 32]
    values *= F.embedding(scales[..., : blocks.shape[-2]].int(), powers)
    return values.to(dtype).flatten(-2)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of every byte [256, 2], and the power of two of every scale [256, 1]."""
    values, codes = torch.tensor(VALUES, device=device), torch.arange(256, device=device)
    pairs = torch.stack((values[codes & 0x0F], values[codes >> 4]), 1)
    return pairs, torch.ldexp(torch.ones(256, 1, device=device), codes[:, None] - SCALE_BIAS)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., G * 32] -> (blocks uint8 [..., G, 16], scales uint8 [..., G]), each value to the nearest."""
    grouped = values.float().view(*values.shape[:-1], -1, GROUP)  # [..., G, 32]
    largest = grouped.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - MAX_EXPONENT  # frexp: largest = m * 2**e with m in [0.5, 1)
    exponents = torch.where(largest > 0, exponents, 0).clamp(-SCALE_BIAS, SCALE_BIAS)
    scaled = torch.ldexp(grouped, -exponents.unsqueeze(-1))
    magnitudes = torch.tensor(VALUES[:8], device=values.device)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), midpoints) + 8 * (scaled < 0)  # [..., G, 32]
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + SCALE_BIAS).to(torch.uint8)
