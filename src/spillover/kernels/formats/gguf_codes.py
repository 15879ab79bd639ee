"""Weights kept and multiplied in the codes of a quantised file: see native/coded/coded.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from spillover.kernels.arena import Arena
from spillover.kernels.code_layout import PanelLayout, pack_rows, values_of
from spillover.kernels.extents import CODE_BLOCK, CODE_PANEL
from spillover.kernels.fields import ITEMSIZE, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.packed import CODES, Panels

_LISTS = 128  # bytes of the list of matrices before the panels, for at most three matrices
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DOUBLED_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class CodeForm:
    """A way to write weights as codes. Without a head: w = block[0] * code + block[1], or block[0] * code. With a
    float16 head: w = head[0] * block[0] * code - head[1] * block[1]; with a float32 one: w = head[0] * code + head[1],
    or with scales of parts w = head[0] * block[part] * code, or block[part] / head[0] * code if the head `divides`.
    Codes without an offset are counted from the middle of their range."""

    number: int  # number of this form in native/coded/coded.cpp
    bits: int  # bits of a code; codes of 8 bits are signed
    block: tuple[str, ...]  # types of the numbers of each row and block of 32 columns
    head: tuple[str, ...] = ()  # types of the numbers of each row and `unit` columns
    unit: int = CODE_BLOCK  # columns that share a head
    values: tuple[int, ...] = ()  # values that codes are indices of; none: codes are numbers
    divides: bool = False  # whether the block's numbers are divided by the head's

    @property
    def parts(self) -> int:
        """Return the number of parts of a block, each with its own scale."""
        return sum(kind in ("int8", "float8_e4m3fn") for kind in self.block) or 1

    @property
    def has_offset(self) -> bool:
        return len(self.head or self.block) == 2

    @property
    def layout(self) -> PanelLayout:
        block, head = (tuple(ITEMSIZE[kind] for kind in kinds) for kinds in (self.block, self.head))
        return PanelLayout(self.bits, block, head, self.unit // CODE_BLOCK)

    def panel_bytes(self, columns: int) -> int:
        return columns // self.unit * self.layout.unit_bytes


CODE_FORMS = {  # by the name of GGUF's type
    "Q4_0": CodeForm(0, 4, ("float16",)),
    "Q4_1": CodeForm(1, 4, ("float16", "float16")),
    "Q5_0": CodeForm(2, 5, ("float16",)),
    "Q5_1": CodeForm(3, 5, ("float16", "float16")),
    "Q8_0": CodeForm(4, 8, ("float16",)),
    "Q4_K": CodeForm(5, 4, ("uint8", "uint8"), ("float16", "float16"), 256),
    "Q5_K": CodeForm(6, 5, ("uint8", "uint8"), ("float16", "float16"), 256),
    "Q6_K": CodeForm(7, 6, ("int8", "int8"), ("float16",), 256),  # two scales, for 16 columns each
    "IQ4_NL": CodeForm(8, 4, ("float16",), values=_IQ4_VALUES),
    "MXFP4": CodeForm(9, 4, ("bfloat16",), values=_DOUBLED_FP4_VALUES),
}


def grouped_form(bits: int, group: int) -> CodeForm:
    """Return the form of codes of 4 bits, or 8 (signed), with a float32 scale and offset for every `group` columns, a
    multiple of 32."""
    return CodeForm({4: 10, 8: 11}[bits], bits, (), ("float32", "float32"), group)


def nvfp4_form(columns: int, divides: bool) -> CodeForm:
    """Return the form of NVFP4 in rows of `columns`: two e4m3 scales per block, for 16 columns each, and per row a
    float32 number by which they are multiplied, or divided if it `divides`."""
    return CodeForm(13 if divides else 12, 4, ("float8_e4m3fn", "float8_e4m3fn"), ("float32",), columns,
                    _DOUBLED_FP4_VALUES, divides)


def splits_blocks(columns: tuple[int, int] | None, units: Iterable[int]) -> bool:
    """Return whether a part of a matrix begins or ends within a block, or within columns that share a head."""
    return columns is not None and any(bound % unit for bound in columns for unit in (CODE_BLOCK, *units))


@dataclass(frozen=True)
class Codes:
    """A [N, K] weight as stored in its file."""

    form: CodeForm
    values: Tensor  # [N, K] uint8; int8 if codes have 8 bits
    block: tuple[Tensor, ...]  # [N, K / CODE_BLOCK]
    head: tuple[Tensor, ...] = ()  # [N, K / unit]

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Return the same with `change` applied to each tensor [N, ...], to choose rows or move them."""
        return Codes(self.form, change(self.values), tuple(change(part) for part in self.block),
                     tuple(change(part) for part in self.head))

    def weight(self) -> Tensor:
        """Return the weight [N, K] in float32."""
        form = self.form
        rows, columns = self.values.shape
        blocks = columns // CODE_BLOCK
        shape = (rows, blocks * form.parts, CODE_BLOCK // form.parts)
        block = tuple(part.float() for part in self.block)
        head = tuple(part.float().repeat_interleave(form.unit // CODE_BLOCK, dim=1) for part in self.head)
        scales, *offsets = head or block
        if block and head:
            scales = torch.stack([part / head[0] if form.divides else head[0] * part for part in block[: form.parts]],
                                 dim=-1).flatten(1)
            offsets = [-(head[1] * block[1])] if form.has_offset else []
        values = self.values
        if form.values:
            values = torch.tensor(form.values, dtype=torch.int8)[values.int()]
        weight = values.float()
        if form.bits < 8 and not form.values and not form.has_offset:
            weight -= 1 << form.bits - 1
        weight = scales.unsqueeze(-1) * weight.reshape(shape)
        for offset in offsets:
            weight += offset.unsqueeze(-1)
        return weight.reshape(rows, columns)


def grouped_codes(values: Tensor, scales: Tensor, offsets: Tensor) -> Codes:
    """Return codes of w = scales * values + offsets; values [N, K]: uint8 of 4 bits, or int8; others [N, K / group]."""
    bits, group = (8 if values.dtype is torch.int8 else 4), values.shape[1] // scales.shape[1]
    return Codes(grouped_form(bits, group), values, (), (scales.float(), offsets.float()))


@dataclass(frozen=True)
class GgufCodes(Panels):
    """A format: a list of matrices, and the panels of one matrix after another, as bytes."""

    forms: tuple[CodeForm, ...]  # forms of the fused matrices
    quant_method = "gguf"
    panel_kind = CODES

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("panels", "uint8", (self._nbytes(shape),)),)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return pack_codes([reader.read_codes(name) for name, _ in reader.matrices], target.arena).tensors

    def for_part(self, shape: LinearShape, columns: tuple[int, int] | None) -> WeightFormat:
        return DENSE if splits_blocks(columns, [form.unit for form in self.forms]) else self

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return unpack_codes(w)

    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        """Look up rows, unpacking only the panels that have them."""
        found = torch.empty(ids.shape[0], w.shape.in_features)
        row = 0
        for form, rows, panels in self._matrices(w.shape, w.tensors[0]):
            in_matrix = (ids >= row) & (ids < row + rows)
            inner = ids[in_matrix] - row
            unique, position = torch.unique(inner // CODE_PANEL, return_inverse=True)
            found[in_matrix] = _unpacked(form, panels[unique])[position * CODE_PANEL + inner % CODE_PANEL]
            row += rows
        return found

    def _nbytes(self, shape: LinearShape) -> int:
        return _LISTS + sum(-(-rows // CODE_PANEL) * form.panel_bytes(shape.in_features)
                            for form, rows in self._runs(shape))

    def _runs(self, shape: LinearShape) -> list[tuple[CodeForm, int]]:
        """Return forms and numbers of rows, with consecutive matrices of one form as one."""
        listed = zip(self.forms, shape.output_sizes, strict=True)
        return [(form, sum(rows for _, rows in together)) for form, together in groupby(listed, key=lambda one: one[0])]

    def _matrices(self, shape: LinearShape, packed: Tensor) -> Iterator[tuple[CodeForm, int, Tensor]]:
        """Yield each matrix's form, number of rows and panels [panels, bytes], as a view."""
        start = _LISTS
        for form, rows in self._runs(shape):
            size = (-(-rows // CODE_PANEL), form.panel_bytes(shape.in_features))
            yield form, rows, packed[start : start + math.prod(size)].view(size)
            start += math.prod(size)

    def pack(self, parts: Sequence[Codes], packed: Tensor) -> None:
        """Write the list of matrices and the panels into `packed`."""
        shape = LinearShape(tuple(part.values.shape[0] for part in parts), parts[0].values.shape[1])
        left, start = list(parts), _LISTS
        lists = torch.zeros(_LISTS // 8, dtype=torch.int64)
        for i, (form, rows, panels) in enumerate(self._matrices(shape, packed)):
            lists[0] = i + 1
            lists[4 + 4 * i : 8 + 4 * i] = torch.tensor([form.number, form.unit // CODE_BLOCK, rows, start])
            start += panels.numel()
            if rows % CODE_PANEL:
                panels[-1].zero_()
            row = 0
            while left and left[0].form == form and row < rows:
                part = left.pop(0)
                pack_rows(part.values, part.block, part.head, form.layout, panels, row)
                row += part.values.shape[0]
        packed[:_LISTS] = lists.view(torch.uint8)


def pack_codes(parts: Sequence[Codes], arena: Arena | None = None) -> Linear:
    """Pack weights into a linear, concatenated along rows. `arena`: allocator of panels that stay in memory."""
    weight_format = GgufCodes(tuple(part.form for part in parts))
    shape = LinearShape(tuple(part.values.shape[0] for part in parts), parts[0].values.shape[1])
    (field,) = weight_format.fields(shape, "float32")
    packed = (torch.empty(field.shape, dtype=torch.uint8) if arena is None
              else arena.empty(field.nbytes // 4).view(torch.uint8))
    weight_format.pack(parts, packed)
    return Linear(weight_format, shape, (packed,))


def unpack_codes(w: Linear) -> Tensor:
    """Return the [N, K] weight in float32."""
    assert isinstance(w.format, GgufCodes)
    return torch.cat([_unpacked(form, panels)[:rows]
                      for form, rows, panels in w.format._matrices(w.shape, w.tensors[0])])


def _unpacked(form: CodeForm, panels: Tensor) -> Tensor:
    """Return the weight [channels, columns] in float32 of [panels, bytes]."""
    count = panels.shape[0]
    layout = form.layout
    units = panels.shape[1] // layout.unit_bytes
    heads, inner = panels.reshape(count, units, -1).split_with_sizes(
        [layout.head_bytes, layout.blocks * layout.block_bytes], -1)
    sizes = [CODE_PANEL * size for size in layout.block]
    *block, vectors = inner.reshape(count, units, layout.blocks, -1).split_with_sizes(
        [*sizes, layout.block_bytes - sum(sizes)], -1)
    head = heads.split_with_sizes([CODE_PANEL * size for size in layout.head], -1)

    def channels(part: Tensor, kind: str) -> Tensor:
        numbers = part.contiguous().view(getattr(torch, kind)).view(count, -1, CODE_PANEL)
        return numbers.transpose(1, 2).reshape(count * CODE_PANEL, -1)

    return Codes(form, values_of(vectors, form.bits, count),
                 tuple(map(channels, block, form.block)), tuple(map(channels, head, form.head))).weight()
