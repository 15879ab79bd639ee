"""Quantised tensors of a GGUF file as codes, scales and offsets: the forms that are blocks of 32 with a scale each."""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.gguf_codes import Codes

_BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}


def code_bits(kind: GGMLQuantizationType) -> int:
    """Return the bits of a code; 0: not one of these forms."""
    return _BITS.get(kind, 0)


def codes_of(raw: np.ndarray[tuple[int, int], np.dtype[np.uint8]], kind: GGMLQuantizationType) -> Codes:
    """Split `raw` [rows, bytes], blocks of a scale, an offset in Q4_1 alone, and the codes."""
    rows, bits = raw.shape[0], _BITS[kind]
    head = 2 * (1 + (kind is GGMLQuantizationType.Q4_1))
    blocks = torch.from_numpy(raw).view(rows, -1, head + CODE_BLOCK * bits // 8)
    scales, stored = _number(blocks, 0), blocks[..., head:]
    if bits == 8:
        return Codes(stored.reshape(rows, -1).view(torch.int8), scales, None)
    # Byte j has values j (low) and j + 16 (high).
    values = torch.cat((stored & 15, stored >> 4), dim=-1).view(rows, -1)
    # Q4_0 is scale * (code - 8).
    return Codes(values, scales, _number(blocks, 2) if kind is GGMLQuantizationType.Q4_1 else scales * -8)


def _number(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at that byte of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)
