"""Random weights in the codes of GGUF files and of NVFP4, and the required accuracy of products with them."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.gguf_codes import CODE_FORMS, Codes, nvfp4_form, pack_codes
from spillover.models.gguf.gguf_codes import codes_of

KINDS = [Kind[name] for name in CODE_FORMS]
NVFP4 = ("NVFP4", "NVFP4, divided")  # by whether scales are multiplied by the global one or divided by it
_HALVES = {Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
           Kind.MXFP4: ()}


def stored(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return weights as stored in a file: any codes, scales and offsets of either sign."""
    random = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):  # offsets of the float16 numbers in a block
        numbers = random.standard_normal((rows, columns // block, 1)) * 32 / block
        blocks[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    if kind is Kind.MXFP4:  # scales near 1
        blocks[..., 0] = random.integers(120, 134, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def coded(kind: Kind | str, rows: int, columns: int, seed: int = 0) -> Linear:
    """Return a weight of a type of GGUF, or of one in NVFP4."""
    if isinstance(kind, str):
        random = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=random)
        scales = (torch.randn(2, rows, columns // CODE_BLOCK, generator=random) * 100).to(torch.float8_e4m3fn)
        divides = kind == NVFP4[1]
        head = (torch.rand(rows, 1, generator=random) + 0.5) * (100 if divides else 0.01)
        return pack_codes([Codes(nvfp4_form(columns, divides), values, tuple(scales), (head,))])
    return pack_codes([codes_of(stored(kind, rows, columns, seed), kind)])


def room(x: Tensor, weight: Tensor) -> Tensor:
    """Return how far rounding may move y: a few float32 roundings of a block's largest x times its largest weight, for
    each block of 32 columns that is summed."""
    rows, columns = x.shape
    blocks = columns // CODE_BLOCK
    largest = x.abs().view(rows, blocks, CODE_BLOCK).amax(-1).double() * CODE_BLOCK
    # Codes minus their centre are added to an offset, hence the factor of 4.
    heaviest = weight.abs().view(-1, blocks, CODE_BLOCK).amax(-1).double() * 4
    return (largest @ heaviest.T) * 2.0**-23 * (blocks + 4)
