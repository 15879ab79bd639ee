"""OCP MXFP4: 32 four-bit floats (E2M1) share one power-of-two scale (E8M0), the low nibble first."""

from __future__ import annotations

import torch
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
    scales = scales[..., : blocks.shape[-2]]
    table = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    values = torch.empty((*blocks.shape, 2), dtype=dtype, device=blocks.device)
    values[..., 0] = table[(blocks & 0x0F).int()]
    values[..., 1] = table[(blocks >> 4).int()]
    exponents = scales.int() - SCALE_BIAS
    scaled = torch.ldexp(values.flatten(-2), exponents.unsqueeze(-1))  # [..., G, 32]
    return scaled.to(dtype).flatten(-2)


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
