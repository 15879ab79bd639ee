"""Random weights in the codes of GGUF files, and how exact products with them must be."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.gguf_codes import pack_codes
from spillover.models.gguf.gguf_codes import codes_of

KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]


def stored(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """As a file has it: any codes, scales and offsets of either sign."""
    random = np.random.default_rng(seed)
    blocks = columns // CODE_BLOCK
    head = random.standard_normal((rows, blocks, 2 if kind is Kind.Q4_1 else 1)).astype(np.float16)
    size = CODE_BLOCK if kind is Kind.Q8_0 else CODE_BLOCK // 2
    codes = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    return np.concatenate((head.view(np.uint8).reshape(rows, blocks, -1), codes), -1).reshape(rows, -1)


def coded(kind: Kind, rows: int, columns: int, seed: int = 0) -> Linear:
    return pack_codes([codes_of(stored(kind, rows, columns, seed), kind)])


def room(x: Tensor, weight: Tensor) -> Tensor:
    """What roundings may move y by: a few of float32's, of a block's largest x times its largest weight, for each block
    of 32 columns that is added up."""
    rows, columns = x.shape
    blocks = columns // CODE_BLOCK
    largest = x.abs().view(rows, blocks, CODE_BLOCK).amax(-1).double() * CODE_BLOCK
    # Codes less their centre, beside an offset.
    heaviest = weight.abs().view(-1, blocks, CODE_BLOCK).amax(-1).double() * 4
    return (largest @ heaviest.T) * 2.0**-23 * (blocks + 4)
