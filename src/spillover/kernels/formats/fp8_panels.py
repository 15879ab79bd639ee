"""FP8 in panels for the native kernels of a CPU, which widen it to the floats of its dequantised weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.arena import Arena
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader
from spillover.kernels.formats.fp8 import Fp8Format
from spillover.kernels.formats.fp8_block import BLOCK, blocks
from spillover.kernels.formats.packed import FP8, Panels

NAN = 0x7F  # code of NaN without its sign


@dataclass(frozen=True)
class Fp8Panels(Panels):
    """A format: panels of `width` channels as bytes: float32 scales [blocks of K, width], then codes [K, width]."""

    base: Fp8Format
    width: int
    quant_method = "fp8_panels"
    panel_kind = FP8

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("panels", "uint8", (-(-shape.out_features // self.width), self._panel_bytes(shape.in_features))),)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)[:1]  # a matrix in a wider type has no scales

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load_or_round(reader, shape, target), target.arena)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        made = [self.packed_tensors(shape, self.base.dummy(shape, 0, target, random))[0] for _ in range(experts or 1)]
        return (torch.stack(made) if experts else made[0],)

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...],
                       arena: Arena | None = None) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made from those of `base`. `arena`: allocator of panels that stay in
        memory."""
        values, scales = tensors
        rows, columns = values.shape
        codes = torch.zeros(-(-rows // self.width) * self.width, columns, dtype=torch.uint8)
        codes[:rows] = values.view(torch.uint8)
        numbers = torch.zeros(len(codes), blocks(columns))
        numbers[:rows] = self.base.row_scales(shape, scales)
        # The native product has no code for NaN; with a scale that is NaN the output is NaN as well.
        odd = (codes & NAN == NAN).nonzero()
        numbers[odd[:, 0], odd[:, 1] // BLOCK] = torch.nan
        parts = [part.view(-1, self.width, part.shape[1]).transpose(1, 2).contiguous().flatten(1).view(torch.uint8)
                 for part in (numbers, codes)]
        if arena is None:
            return (torch.cat(parts, 1),)
        panels = arena.empty(sum(part.numel() for part in parts) // 4).view(torch.uint8).view(len(parts[0]), -1)
        return (torch.cat(parts, 1, out=panels),)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        (panels,) = w.tensors
        columns, size = w.shape.in_features, 4 * self.width * blocks(w.shape.in_features)
        codes = panels[:, size:].reshape(-1, columns, self.width).transpose(1, 2).flatten(0, 1)
        scales = panels[:, :size].contiguous().view(torch.float32).view(len(panels), -1, self.width).transpose(1, 2)
        wide = scales.flatten(0, 1).repeat_interleave(BLOCK, 1)[:, :columns]
        whole = codes.contiguous().view(torch.float8_e4m3fn).float() * wide
        return whole[: w.shape.out_features].to(dtype)

    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        return self.dequantize(w, torch.float32)[ids]

    def _panel_bytes(self, columns: int) -> int:
        return self.width * (4 * blocks(columns) + columns)
