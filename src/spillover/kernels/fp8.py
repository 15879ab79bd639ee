"""FP8 weights as DeepSeek and Qwen publish them: e4m3 values, a float32 scale for every block of 128 x 128."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale
LARGEST = 448.0  # of e4m3


def blocks(size: int) -> int:
    """Blocks along a dimension; the last may be partly empty."""
    return -(-size // BLOCK)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values float8_e4m3fn [..., N, K], scales float32 [..., blocks of N, blocks of K] -> [..., N, K]."""
    rows, columns = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return (values.float() * wide).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (float8_e4m3fn [N, K], float32 [blocks of N, blocks of K]), the largest of a block at 448."""
    rows, columns = weight.shape
    padded = torch.zeros(blocks(rows) * BLOCK, blocks(columns) * BLOCK, device=weight.device)
    padded[:rows, :columns] = weight
    tiles = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    codes = (tiles / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales
