"""Integers in groups that share a scale, in the panels that native/coded/coded.cpp multiplies with, for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader
from spillover.kernels.formats.gguf_codes import Codes, GgufCodes, grouped_codes, grouped_form, pack_codes
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.packed import CODES, Panels


@dataclass(frozen=True)
class GroupedPanels(Panels):
    """A format: panels of codes with a float32 scale and offset per group, w = scale * code + offset; if `base` is
    ordered, separate panels for each fused matrix, and the order."""

    base: GroupedInt
    quant_method = "grouped_panels"

    @classmethod
    def serves(cls, base: GroupedInt, shape: LinearShape) -> bool:
        """Return whether a linear can be kept in this format."""
        group = base.group or shape.in_features
        return group % CODE_BLOCK == 0 == shape.in_features % group

    @property
    def panel_kind(self) -> int | None:  # type: ignore[override]
        return None if self.base.ordered else CODES  # block.cpp does not reorder columns

    def _shapes(self, shape: LinearShape) -> list[LinearShape]:
        """Return the shapes of the linears that have their own tensor of panels."""
        if not self.base.ordered:
            return [shape]
        return [LinearShape((rows,), shape.in_features) for rows in shape.output_sizes]

    def _codes(self, shape: LinearShape) -> GgufCodes:
        form = grouped_form(self.base.bits, self.base.group or shape.in_features)
        return GgufCodes((form,) * len(shape.output_sizes))

    def _linears(self, w: Linear) -> list[Linear]:
        return [Linear(self._codes(shape), shape, (panels,))
                for shape, panels in zip(self._shapes(w.shape), w.tensors, strict=False)]

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        panels = [Field(f"panels{index or ''}", "uint8", self._codes(part).fields(part, dtype)[0].shape)
                  for index, part in enumerate(self._shapes(shape))]
        return *panels, *(field for field in self.base.fields(shape, dtype) if field.name == "order")

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load(reader, shape, target), target)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        if not experts:
            return self.packed_tensors(shape, self.base.dummy(shape, 0, target, random), target)
        made = [self.packed_tensors(shape, self.base.dummy(shape, 0, target, random)) for _ in range(experts)]
        return tuple(map(torch.stack, zip(*made, strict=True)))

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...],
                       target: Target | None = None) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made from those of `base`."""
        named = dict(zip((field.name for field in self.base.fields(shape, "float32")), tensors, strict=True))
        made: list[Tensor] = []
        start = 0
        for part in self._shapes(shape):
            codes = []
            for size in part.output_sizes:
                codes.append(self._matrix(named, slice(start, start + size)))
                start += size
            made += pack_codes(codes, None if target is None else target.arena).tensors
        return (*made, *([named["order"]] if self.base.ordered else []))

    def _matrix(self, named: dict[str, Tensor], rows: slice) -> Codes:
        values, scales = self.base.unpack(named["codes"][rows]), named["scales"][rows].float()
        zeros = named["zeros"][rows].float() if self.base.zeros else float(1 << (self.base.bits - 1))
        if self.base.bits == 4:
            return grouped_codes(values, scales, -zeros * scales)
        return grouped_codes((values ^ 128).view(torch.int8), scales, (128 - zeros) * scales)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        numbers = [part.format.dequantize(part, torch.float32) for part in self._linears(w)]
        if self.base.ordered:
            numbers = [torch.empty_like(part).index_copy_(1, order.long(), part)
                       for part, order in zip(numbers, w.tensors[-1], strict=True)]
        return torch.cat(numbers).to(dtype)

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        if not self.base.ordered:
            return super().linear(x, w, bias)
        sizes = w.shape.output_sizes
        biases = [None] * len(sizes) if bias is None else [part.contiguous() for part in bias.split_with_sizes(sizes)]
        return torch.cat([part.format.linear(x.index_select(1, order), part, added) for part, order, added
                          in zip(self._linears(w), w.tensors[-1], biases, strict=True)], 1)

    def embedding(self, ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.embedding_lookup(ids, w) if self.base.ordered else super().embedding(ids, w, dtype)

    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        if self.base.ordered:
            return self.dequantize(w, torch.float32)[ids]
        (whole,) = self._linears(w)
        return self._codes(w.shape).embedding_lookup(ids, whole)
