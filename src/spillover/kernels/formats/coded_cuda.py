"""Codes in the tiles that cuda/coded_linear.py multiplies with, for a CUDA device: integers in groups that share a
scale, and the codes of GGUF files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.cuda.coded_linear import SCALES, STEP, STRIP, Codes, TileForm
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats import gguf_codes
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.gguf_codes import CodeForm, splits_blocks
from spillover.kernels.formats.grouped_int import GroupedInt

WEIGHTS_AT_ONCE = 1 << 22  # number of weights that are dequantised at a time if there are no kernels
BYTES_PER_WEIGHT = 16  # temporary bytes of each of these weights


class Part(NamedTuple):
    """Rows of a linear that are kept as tiles of one form."""

    form: TileForm
    rows: int
    halves: bool = False  # see cuda.in_pairs


class Tiles(WeightFormat):
    """Tiles uint8 [N / STRIP, K / STEP, bytes] for each part of a linear, in the order of rows. A row has the same bits
    whatever the other rows."""

    begins_early = True

    @abstractmethod
    def parts(self, shape: LinearShape) -> tuple[Part, ...]:
        """Return the parts of a linear."""

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return tuple(Field(f"tiles{index or ''}", "uint8", part.form.tiles_shape(part.rows, shape.in_features))
                     for index, part in enumerate(self.parts(shape)))

    def input_of(self, x: Tensor, w: Linear, index: int) -> Tensor:
        """Return x with columns in the order of a part's tiles."""
        return x

    def numbers_of(self, numbers: Tensor, w: Linear, index: int) -> Tensor:
        """Return a part's dequantised tiles [rows, K] with columns in the order of the weight."""
        return numbers

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return torch.cat([self.numbers_of(cuda.unpack(w.tensors[i], part.form, part.halves).to(dtype), w, i)
                          for i, part in enumerate(self.parts(w.shape))])

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        return BYTES_PER_WEIGHT * min(WEIGHTS_AT_ONCE, shape.out_features * shape.in_features)

    def prepare(self, linears: Sequence[tuple[LinearShape, bool]], target: Target, most_rows: int) -> None:
        for form in {part.form: None for shape, _ in linears for part in self.parts(shape)}:
            cuda.kernels(form, getattr(torch, target.dtype), target.device)

    def batch_invariant(self) -> WeightFormat:
        return self

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        parts = self.parts(w.shape)
        biases = [None] * len(parts) if bias is None else bias.split_with_sizes([part.rows for part in parts])
        made = [_multiply(self.input_of(x, w, i), w.tensors[i], part, biases[i]) for i, part in enumerate(parts)]
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        part = self.parts(w.shape)[0]
        if not part.halves or not _has_kernels(part.form, x):
            return super().linear_silu(x, w, bias)
        return _multiply(x, w.tensors[0], part, bias, gated=True)

    def embedding(self, ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
        (part,), tiles = self.parts(w.shape), w.tensors[0]
        if cuda.kernels(part.form, dtype, tiles.device) is not None:
            return cuda.embedding_lookup(ids, tiles, part.form, dtype)
        made = torch.empty(len(ids), w.shape.in_features, dtype=dtype, device=tiles.device)
        each = max(1, WEIGHTS_AT_ONCE // (STRIP * made.shape[1]))
        for first in range(0, len(ids), each):
            some = ids[first : first + each]
            strips = cuda.unpack(tiles[some // STRIP], part.form, False).view(len(some), STRIP, -1)
            made[first : first + each] = strips[torch.arange(len(some), device=some.device), some % STRIP]
        return made


@dataclass(frozen=True)
class CodedCuda(Tiles):
    """A format: tiles of integers in groups, and the order of columns if `base` is ordered."""

    base: GroupedInt
    quant_method = "coded_cuda"

    @classmethod
    def serves(cls, base: GroupedInt, shape: LinearShape) -> bool:
        """Return whether a linear can be kept so."""
        group = base.group or shape.in_features
        whole = not base.ordered or all(size % STRIP == 0 for size in shape.output_sizes)
        return whole and shape.in_features % group == 0 and cuda.fits(shape.out_features, shape.in_features, group)

    @cached_property
    def form(self) -> TileForm:
        groups = STEP // self.base.group if 0 < self.base.group < STEP else 1
        return TileForm(self.base.bits, groups, SCALES[getattr(torch, self.base.scale_dtype)], self.base.zeros)

    def parts(self, shape: LinearShape) -> tuple[Part, ...]:
        if self.base.ordered:  # each matrix has its own order
            return tuple(Part(self.form, rows) for rows in shape.output_sizes)
        return (Part(self.form, shape.out_features, cuda.in_pairs(shape.output_sizes)),)

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return *super().fields(shape, dtype), *(field for field in self.base.fields(shape, dtype)
                                                if field.name == "order")

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load(reader, shape, target))

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.dummy(shape, 0, target, random))

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made of those of `base`."""
        named = dict(zip((field.name for field in self.base.fields(shape, "float32")), tensors, strict=True))
        made, start = [], 0
        for part in self.parts(shape):
            rows = slice(start, start + part.rows)
            zeros = named["zeros"][rows] if self.base.zeros else None
            codes = Codes(self.base.unpack(named["codes"][rows]), named["scales"][rows], zeros)
            made.append(cuda.pack(codes, part.form, part.halves))
            start += part.rows
        return (*made, *([named["order"]] if self.base.ordered else []))

    def input_of(self, x: Tensor, w: Linear, index: int) -> Tensor:
        return x.index_select(1, w.tensors[-1][index]) if self.base.ordered else x

    def numbers_of(self, numbers: Tensor, w: Linear, index: int) -> Tensor:
        if not self.base.ordered:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, w.tensors[-1][index].long(), numbers)


@dataclass(frozen=True)
class GgufCuda(Tiles):
    """A format: tiles of the codes of a GGUF file; consecutive matrices of one form are one part. Codes of five and six
    bits, and codes that are indices of values, take a byte."""

    forms: tuple[CodeForm, ...]  # forms of the fused matrices
    quant_method = "gguf"

    @classmethod
    def serves(cls, forms: Sequence[CodeForm], shape: LinearShape) -> bool:
        """Return whether a linear can be kept so."""
        made = GgufCuda(tuple(forms)).parts(shape)
        return all(cuda.fits(part.rows, shape.in_features, STEP // part.form.groups) for part in made)

    def for_part(self, shape: LinearShape, columns: tuple[int, int] | None) -> WeightFormat:
        whole = not splits_blocks(columns, [form.unit for form in self.forms])
        return self if whole and self.serves(self.forms, shape) else DENSE

    def parts(self, shape: LinearShape) -> tuple[Part, ...]:
        counted = [(tile_form(form), sum(shape.output_sizes[i] for i in which)) for form, which in self._runs()]
        if len(counted) > 1:
            return tuple(Part(form, rows) for form, rows in counted)
        return (Part(*counted[0], cuda.in_pairs(shape.output_sizes)),)

    def _runs(self) -> list[tuple[CodeForm, list[int]]]:
        """Return the forms, each with the indices of the consecutive matrices that have it."""
        return [(form, list(which)) for form, which in groupby(range(len(self.forms)), lambda i: self.forms[i])]

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        made = []
        for part, (_, which) in zip(self.parts(shape), self._runs(), strict=True):
            read = [tile_codes(reader.read_codes(reader.matrices[i][0]).map(lambda part: part.to(target.device)))
                    for i in which]
            made.append(cuda.pack(read[0] if len(read) == 1 else _concat_rows(read), part.form, part.halves))
        return tuple(made)


def tile_form(form: CodeForm) -> TileForm:
    """Return the form of tiles for a form of GGUF codes."""
    bits = 4 if form.bits == 4 and not form.values else 8
    scales = (("SUPER" if form.has_offset else "SIGNED") if form.head else
              "PAIR" if form.has_offset else SCALES[getattr(torch, form.block[0])])
    middle = 1 << (form.bits - 1) if form.has_offset and bits > form.bits else 0
    return TileForm(bits, STEP * form.parts // CODE_BLOCK, scales, middle=middle)


def tile_codes(codes: gguf_codes.Codes) -> Codes:
    """Convert the codes of a GGUF file to those of tiles, exactly: codes that take a byte are counted from 128."""
    form, values = codes.form, codes.values
    if form.values:
        values = torch.tensor(form.values, device=values.device).add(128).to(torch.uint8)[values.int()]
    elif form.bits == 8:
        values = values.view(torch.uint8) ^ 128
    elif form.bits > 4:
        values = values + (128 - (1 << (form.bits - 1)))
    scales = codes.block[0] if form.parts == 1 else torch.stack(codes.block, -1).flatten(1)
    factors = codes.head if not form.has_offset or not form.head else (codes.head[0], -codes.head[1])
    return Codes(values, scales, None, codes.block[1] if form.has_offset else None, factors, tile_form(form).middle)


def _concat_rows(codes: Sequence[Codes]) -> Codes:
    offsets = [each.offsets for each in codes if each.offsets is not None]
    return Codes(torch.cat([each.values for each in codes]), torch.cat([each.scales for each in codes]), None,
                 torch.cat(offsets) if offsets else None,
                 tuple(map(torch.cat, zip(*(each.factors for each in codes), strict=True))), codes[0].middle)


def _has_kernels(form: TileForm, x: Tensor) -> bool:
    return cuda.kernels(form, x.dtype, x.device) is not None


def _multiply(x: Tensor, tiles: Tensor, part: Part, bias: Tensor | None, gated: bool = False) -> Tensor:
    from spillover.kernels.triton.launch import pdl_options

    if _has_kernels(part.form, x):
        return cuda.coded_linear(x, tiles, part.form, bias, part.halves, gated, pdl_options(x.device)["EARLY"])
    return _multiply_numbers(x, tiles, part, bias)


def _multiply_numbers(x: Tensor, tiles: Tensor, part: Part, bias: Tensor | None) -> Tensor:
    """Dequantise a few rows at a time, and multiply by them."""
    from spillover.kernels.triton.ordered_linear import ordered_linear

    out = torch.empty(x.shape[0], part.rows, dtype=x.dtype, device=x.device)
    for strips, rows in _strip_groups(part.rows, tiles.shape[1] * STEP, part.halves):
        numbers = cuda.unpack(tiles[strips], part.form, part.halves).to(x.dtype)
        added = None if bias is None else torch.cat([bias[some] for some in rows])
        made = ordered_linear(x, numbers, added).chunk(len(rows), 1)
        for some, product in zip(rows, made, strict=True):
            out[:, some] = product
    return out


def _strip_groups(channels: int, inner: int, halves: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Yield slices of strips, and the rows of the weight in them."""
    strips, each = channels // STRIP, max(1, WEIGHTS_AT_ONCE // (STRIP * inner))
    half = STRIP // 2
    for first in range(0, strips, each):
        last = min(strips, first + each)
        yield slice(first, last), ([slice(first * half, last * half),
                                    slice(channels // 2 + first * half, channels // 2 + last * half)] if halves
                                   else [slice(first * STRIP, last * STRIP)])
