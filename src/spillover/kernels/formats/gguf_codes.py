"""Weights in the codes that a quantised file has, multiplied as they are: see native/coded.cpp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.arena import Arena
from spillover.kernels.extents import CODE_BLOCK, CODE_BYTES, CODE_PANEL
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader
from spillover.kernels.formats.packed import Panels

HALF = CODE_PANEL // 2
VECTORS = {4: 4, 8: 8}  # of the codes of half a panel's channels
_ROWS = 128 * CODE_PANEL  # packed at a time


@dataclass(frozen=True)
class Codes:
    """A [N, K] weight as its file has it: w = scale * code + offset."""

    values: Tensor  # [N, K] uint8 of 4 bits, or int8
    scales: Tensor  # [N, K / CODE_BLOCK] float16
    offsets: Tensor | None  # the same; None with int8, where there are none

    @property
    def bits(self) -> int:
        return 4 if self.offsets is not None else 8


@dataclass(frozen=True)
class GgufCodes(Panels):
    """A format: panels [ceil(N / CODE_PANEL), K / CODE_BLOCK, CODE_BYTES] uint8."""

    native_bits: int  # of a code
    quant_method = "gguf"

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        panels = -(-shape.out_features // CODE_PANEL), shape.in_features // CODE_BLOCK, CODE_BYTES[self.native_bits]
        return (Field("panels", "uint8", panels),)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return pack_codes([reader.read_codes(name) for name, _ in reader.matrices], target.arena).tensors

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return unpack_codes(w)

    def look_up(self, ids: Tensor, w: Linear) -> Tensor:
        """Look up rows in their panels alone."""
        unique, where = torch.unique(ids // CODE_PANEL, return_inverse=True)
        shape = LinearShape((unique.shape[0] * CODE_PANEL,), w.shape.in_features)
        return unpack_codes(Linear(self, shape, (w.tensors[0][unique],)))[where * CODE_PANEL + ids % CODE_PANEL]


def pack_codes(parts: list[Codes], arena: Arena | None = None) -> Linear:
    """Pack weights of one form below each other. `arena` is where panels that stay are to lie."""
    rows, columns = sum(part.values.shape[0] for part in parts), parts[0].values.shape[1]
    shape = (-(-rows // CODE_PANEL), columns // CODE_BLOCK, CODE_BYTES[parts[0].bits])
    panels = (torch.empty(shape, dtype=torch.uint8) if arena is None
              else arena.empty(shape[0] * shape[1] * shape[2] // 4).view(torch.uint8).view(shape))
    whole = parts[0] if len(parts) == 1 else Codes(
        torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]),
        None if parts[0].offsets is None else torch.cat([part.offsets for part in parts if part.offsets is not None]))
    for start in range(0, rows, _ROWS):
        taken = slice(start, min(rows, start + _ROWS))
        offsets = None if whole.offsets is None else whole.offsets[taken]
        packed = _packed(Codes(whole.values[taken], whole.scales[taken], offsets))
        panels[start // CODE_PANEL : start // CODE_PANEL + packed.shape[0]] = packed
    sizes = tuple(part.values.shape[0] for part in parts)
    return Linear(GgufCodes(parts[0].bits), LinearShape(sizes, columns), (panels,))


def unpack_codes(w: Linear) -> Tensor:
    """Return the [N, K] weight in float32."""
    (panels,) = w.tensors
    count, blocks, size = panels.shape
    bits = next(bits for bits, block_bytes in CODE_BYTES.items() if block_bytes == size)
    code_bytes = CODE_BLOCK * CODE_PANEL * bits // 8
    numbers = (CODE_BYTES[bits] - code_bytes) // (2 * CODE_PANEL)  # of a channel: a scale, and an offset if it has one
    scales, *offsets, codes = panels.split_with_sizes([2 * CODE_PANEL] * numbers + [code_bytes], dim=-1)

    def channels(part: Tensor) -> Tensor:
        """Reorder float16 [panels, blocks, 32] -> float32 [channels, blocks, 1]."""
        return part.contiguous().view(torch.float16).transpose(1, 2).reshape(count * CODE_PANEL, blocks, 1).float()

    words = codes.reshape(count, blocks, 2, VECTORS[bits], HALF, 2, 2)  # half, vector, channel, parity, byte
    words = torch.stack((words & 15, words >> 4), -1).flatten(-2) if bits == 4 else words.view(torch.int8)
    # column = vector, place in the word, parity
    values = words.permute(0, 2, 4, 1, 3, 6, 5).reshape(count * CODE_PANEL, blocks, CODE_BLOCK).float()
    weight: Tensor = channels(scales) * values
    if offsets:
        weight += channels(offsets[0])
    return weight.reshape(count * CODE_PANEL, blocks * CODE_BLOCK)[: w.shape.out_features]


def _packed(codes: Codes) -> Tensor:
    """Return [panels, blocks, bytes]; rows past the last are zero."""
    rows, columns = codes.values.shape
    count, blocks = -(-rows // CODE_PANEL), columns // CODE_BLOCK

    def filled(part: Tensor) -> Tensor:
        if rows == count * CODE_PANEL:
            return part
        whole = torch.zeros(count * CODE_PANEL, part.shape[1], dtype=part.dtype)
        whole[:rows] = part
        return whole

    def channels(part: Tensor) -> Tensor:
        ordered = filled(part).view(count, CODE_PANEL, blocks).transpose(1, 2).contiguous()
        return ordered.view(torch.uint8).view(count, blocks, 2 * CODE_PANEL)

    bits = codes.bits
    places = 16 // bits  # of a word
    values = filled(codes.values).reshape(count, 2, HALF, blocks, VECTORS[bits], places, 2)
    words = values.permute(0, 3, 1, 4, 2, 6, 5)  # half, vector, channel, parity, place
    if bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    flat = words.contiguous().view(torch.uint8).reshape(count, blocks, -1)
    offsets = [] if codes.offsets is None else [channels(codes.offsets)]
    return torch.cat([channels(codes.scales), *offsets, flat], dim=-1)
