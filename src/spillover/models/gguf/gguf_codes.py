"""Quantised tensors of a GGUF file as codes with their scales and offsets, exactly as stored in the file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from spillover.kernels.code_layout import unpack_fields
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.gguf_codes import CODE_FORMS, Codes
from spillover.kernels.formats.mxfp4 import halved_scales

_SUPER = 256  # columns of a block of Q4_K, Q5_K and Q6_K


def has_codes(kind: GGMLQuantizationType) -> bool:
    return kind.name in CODE_FORMS


def codes_of(raw: np.ndarray[tuple[int, int], np.dtype[np.uint8]], kind: GGMLQuantizationType) -> Codes:
    """Split `raw` [rows, bytes], whose type is in CODE_FORMS, into codes, scales and offsets."""
    blocks = torch.from_numpy(raw).view(raw.shape[0], -1, GGML_QUANT_SIZES[kind][1])
    values, block, head = _SPLIT[kind.name](blocks)
    return Codes(CODE_FORMS[kind.name], values.reshape(raw.shape[0], -1), tuple(block), tuple(head))


_Split = tuple[Tensor, list[Tensor], list[Tensor]]  # values, numbers per block, numbers per head


def _halves(blocks: Tensor, count: int) -> list[Tensor]:
    """Return the first `count` float16 numbers of every block."""
    return [blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1) for at in range(0, 2 * count, 2)]


def _nibbles(stored: Tensor, step: int = 16) -> Tensor:
    return unpack_fields(stored, 4, step)


def _four(numbers: int) -> Callable[[Tensor], _Split]:
    return lambda blocks: (_nibbles(blocks[..., 2 * numbers :]), _halves(blocks, numbers), [])


def _five(numbers: int) -> Callable[[Tensor], _Split]:
    def split(blocks: Tensor) -> _Split:
        high, low = blocks[..., 2 * numbers :].split_with_sizes([CODE_BLOCK // 8, CODE_BLOCK // 2], -1)
        return unpack_fields(high, 1, 1, _nibbles(low)), _halves(blocks, numbers), []
    return split


def _eight(blocks: Tensor) -> _Split:
    return blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 1), []


def _k(bits: int) -> Callable[[Tensor], _Split]:
    def split(blocks: Tensor) -> _Split:
        _, scales, high, low = blocks.split_with_sizes([4, 12, _SUPER // 8 * (bits - 4), _SUPER // 2], -1)
        values = _nibbles(low, 32)
        if bits == 5:
            unpack_fields(high, 1, 32, values)
        first, second, third = scales.split_with_sizes([4, 4, 4], -1)
        sub_scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), -1)
        sub_offsets = torch.cat((second & 63, third >> 4 | second >> 2 & 48), -1)
        return values, [sub_scales.flatten(1), sub_offsets.flatten(1)], _halves(blocks, 2)
    return split


def _six_k(blocks: Tensor) -> _Split:
    low, high, scales, last = blocks.split_with_sizes([_SUPER // 2, _SUPER // 4, _SUPER // 16, 2], -1)
    signed = scales.contiguous().view(torch.int8).flatten(1)
    return unpack_fields(high, 2, 32, _nibbles(low, 64)), [signed[:, 0::2], signed[:, 1::2]], _halves(last, 1)


def _mxfp4(blocks: Tensor) -> _Split:
    return _nibbles(blocks[..., 1:]), [halved_scales(blocks[..., 0])], []


_SPLIT: dict[str, Callable[[Tensor], _Split]] = {
    "Q4_0": _four(1), "Q4_1": _four(2), "Q5_0": _five(1), "Q5_1": _five(2), "Q8_0": _eight, "Q4_K": _k(4),
    "Q5_K": _k(5), "Q6_K": _six_k, "IQ4_NL": _four(1), "MXFP4": _mxfp4}
