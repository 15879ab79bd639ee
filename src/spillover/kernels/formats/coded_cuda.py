"""Integers in groups that share a scale, in the tiles that cuda/coded_linear.py multiplies with, for a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.cuda.coded_linear import SCALES, STEP, STRIP, Codes, Form
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.grouped_int import GroupedInt

PIECE = 1 << 22  # numbers that are dequantised at a time where there are no kernels
PIECE_BYTES = 16  # that each takes on the way


@dataclass(frozen=True)
class CodedCuda(WeightFormat):
    """A format: tiles uint8 [N / STRIP, K / STEP, bytes], and `base`'s order where it is ordered. A row has the same
    bits whatever the rows beside it."""

    base: GroupedInt
    quant_method = "coded_cuda"

    @classmethod
    def serves(cls, base: GroupedInt, shape: LinearShape) -> bool:
        """Return whether a linear can be kept so."""
        group = base.group or shape.in_features
        whole = not base.ordered or all(size % STRIP == 0 for size in shape.output_sizes)
        return whole and shape.in_features % group == 0 and cuda.fits(shape.out_features, shape.in_features, group)

    @cached_property
    def form(self) -> Form:
        groups = STEP // self.base.group if 0 < self.base.group < STEP else 1
        return Form(self.base.bits, groups, SCALES[getattr(torch, self.base.scale_dtype)], self.base.zeros)

    def _halves(self, shape: LinearShape) -> bool:
        return cuda.in_pairs(shape.output_sizes) and not self.base.ordered

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        tiles = Field("tiles", "uint8", self.form.tiles_shape(shape.out_features, shape.in_features))
        return tiles, *(field for field in self.base.fields(shape, dtype) if field.name == "order")

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load(reader, shape, target))

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.dummy(shape, 0, target, random))

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made of those of `base`."""
        named = dict(zip((field.name for field in self.base.fields(shape, "float32")), tensors, strict=True))
        codes = Codes(self.base.unpack(named["codes"]), named["scales"], named.get("zeros"))
        return (cuda.pack(codes, self.form, self._halves(shape)), *([named["order"]] if self.base.ordered else []))

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        numbers = cuda.unpack(w.tensors[0], self.form, self._halves(w.shape)).to(dtype)
        if not self.base.ordered:
            return numbers
        return torch.cat([torch.empty_like(part).index_copy_(1, order.long(), part) for part, order
                          in zip(numbers.split_with_sizes(w.shape.output_sizes), w.tensors[1], strict=True)])

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        return PIECE_BYTES * min(PIECE, shape.out_features * shape.in_features)

    def prepare(self, linears: Sequence[tuple[LinearShape, bool]], target: Target, most_rows: int) -> None:
        cuda.kernels(self.form, getattr(torch, target.dtype), target.device)

    def batch_invariant(self) -> WeightFormat:
        return self

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        tiles, halves = w.tensors[0], self._halves(w.shape)
        if not self.base.ordered:
            return self._multiply(x, tiles, bias, halves)
        sizes = w.shape.output_sizes
        biases = [None] * len(sizes) if bias is None else bias.split_with_sizes(sizes)
        parts = tiles.split_with_sizes([size // STRIP for size in sizes])
        return torch.cat([self._multiply(x.index_select(1, order), part, added, halves) for order, part, added
                          in zip(w.tensors[1], parts, biases, strict=True)], 1)

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        if not self._halves(w.shape) or not self._has_kernels(x):
            return super().linear_silu(x, w, bias)
        return self._multiply(x, w.tensors[0], bias, True, gated=True)

    def _has_kernels(self, x: Tensor) -> bool:
        return cuda.kernels(self.form, x.dtype, x.device) is not None

    def _multiply(self, x: Tensor, tiles: Tensor, bias: Tensor | None, halves: bool, gated: bool = False) -> Tensor:
        from spillover.kernels.triton.launch import early

        if self._has_kernels(x):
            return cuda.coded_linear(x, tiles, self.form, bias, halves, gated, early(x.device)["EARLY"])
        return self._multiply_numbers(x, tiles, bias, halves)

    def _multiply_numbers(self, x: Tensor, tiles: Tensor, bias: Tensor | None, halves: bool) -> Tensor:
        """Dequantise some rows after others, and multiply with each."""
        from spillover.kernels.triton.ordered_linear import ordered_linear

        channels = tiles.shape[0] * STRIP
        out = torch.empty(x.shape[0], channels, dtype=x.dtype, device=x.device)
        for strips, rows in _pieces(channels, tiles.shape[1] * STEP, halves):
            numbers = cuda.unpack(tiles[strips], self.form, halves).to(x.dtype)
            added = None if bias is None else torch.cat([bias[part] for part in rows])
            made = ordered_linear(x, numbers, added).chunk(len(rows), 1)
            for part, product in zip(rows, made, strict=True):
                out[:, part] = product
        return out


def _pieces(channels: int, inner: int, halves: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Yield strips, and the rows of the weight that they are."""
    strips, each = channels // STRIP, max(1, PIECE // (STRIP * inner))
    half = STRIP // 2
    for first in range(0, strips, each):
        last = min(strips, first + each)
        yield slice(first, last), ([slice(first * half, last * half),
                                    slice(channels // 2 + first * half, channels // 2 + last * half)] if halves
                                   else [slice(first * STRIP, last * STRIP)])
