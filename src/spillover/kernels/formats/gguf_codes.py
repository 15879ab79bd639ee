"""Weights kept and multiplied in the codes of a quantised file: see native/coded/coded.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from spillover.kernels.arena import Arena
from spillover.kernels.extents import CODE_BLOCK, CODE_PANEL
from spillover.kernels.fields import ITEMSIZE, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.packed import CODES, Panels

_HALF = CODE_PANEL // 2  # channels of half a panel
_LISTS = 128  # bytes of the list of matrices before the panels, for at most three matrices
_ROWS = 128 * CODE_PANEL  # number of rows that are packed at a time
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DOUBLED_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class CodeForm:
    """A way to write weights as codes. Without a head: w = block[0] * code + block[1], or block[0] * code. With a
    float16 head: w = head[0] * block[0] * code - head[1] * block[1]; with a float32 one: w = head[0] * code + head[1].
    Codes without an offset are counted from the middle of their range."""

    number: int  # number of this form in native/coded/coded.cpp
    bits: int  # bits of a code; codes of 8 bits are signed
    block: tuple[str, ...]  # types of the numbers of each row and block of 32 columns
    head: tuple[str, ...] = ()  # types of the numbers of each row and `unit` columns
    unit: int = CODE_BLOCK  # columns that share a head
    values: tuple[int, ...] = ()  # values that codes are indices of; none: codes are numbers

    @property
    def parts(self) -> int:
        """Return the number of parts of a block, each with its own scale."""
        return self.block.count("int8") or 1

    @property
    def has_offset(self) -> bool:
        return len(self.head or self.block) == 2

    @property
    def head_bytes(self) -> int:
        return CODE_PANEL * sum(ITEMSIZE[kind] for kind in self.head)

    @property
    def block_bytes(self) -> int:
        return CODE_PANEL * (sum(ITEMSIZE[kind] for kind in self.block) + CODE_BLOCK * self.bits // 8)

    def panel_bytes(self, columns: int) -> int:
        return columns // self.unit * self.head_bytes + columns // CODE_BLOCK * self.block_bytes


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
            scales = torch.stack([head[0] * part for part in block[: form.parts]], dim=-1).flatten(1)
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
            together = [left.pop(0)]
            while left and left[0].form == form:
                together.append(left.pop(0))
            whole = together[0] if len(together) == 1 else Codes(
                form, torch.cat([part.values for part in together]),
                tuple(map(torch.cat, zip(*(part.block for part in together), strict=True))),
                tuple(map(torch.cat, zip(*(part.head for part in together), strict=True))))
            for row in range(0, rows, _ROWS):
                some = _packed(whole.map(lambda tensor, row=row: tensor[row : row + _ROWS]))  # type: ignore[misc]
                panels[row // CODE_PANEL : row // CODE_PANEL + some.shape[0]] = some
        packed[:_LISTS] = lists.view(torch.uint8)


def pack_codes(parts: Sequence[Codes], arena: Arena | None = None) -> Linear:
    """Pack weights into a linear, concatenated along rows. `arena`: allocator of panels that stay in memory."""
    form = GgufCodes(tuple(part.form for part in parts))
    shape = LinearShape(tuple(part.values.shape[0] for part in parts), parts[0].values.shape[1])
    (field,) = form.fields(shape, "float32")
    packed = (torch.empty(field.shape, dtype=torch.uint8) if arena is None
              else arena.empty(field.nbytes // 4).view(torch.uint8))
    form.pack(parts, packed)
    return Linear(form, shape, (packed,))


def unpack_codes(w: Linear) -> Tensor:
    """Return the [N, K] weight in float32."""
    assert isinstance(w.format, GgufCodes)
    return torch.cat([_unpacked(form, panels)[:rows]
                      for form, rows, panels in w.format._matrices(w.shape, w.tensors[0])])


def _packed(codes: Codes) -> Tensor:
    """Return codes as [panels, bytes]; rows past the last are zero."""
    form = codes.form
    rows, columns = codes.values.shape
    count, units, blocks = -(-rows // CODE_PANEL), columns // form.unit, form.unit // CODE_BLOCK
    if rows < count * CODE_PANEL:
        codes = codes.map(lambda part: torch.cat((part, part.new_zeros(count * CODE_PANEL - rows, part.shape[1]))))

    def channels(part: Tensor) -> Tensor:
        """Reorder [channels, units or blocks] -> bytes [panels, units, blocks of a unit, bytes]."""
        ordered = part.reshape(count, CODE_PANEL, -1).transpose(1, 2).contiguous().view(torch.uint8)
        return ordered.view(count, units, -1, CODE_PANEL * part.itemsize)

    flat = _vectors(codes.values, form.bits, count).view(count, units, blocks, -1)
    inner = torch.cat([*map(channels, codes.block), flat], dim=-1).view(count, units, -1)
    return torch.cat([*(channels(part).squeeze(2) for part in codes.head), inner], dim=-1).view(count, -1)


def _unpacked(form: CodeForm, panels: Tensor) -> Tensor:
    """Return the weight [channels, columns] in float32 of [panels, bytes]."""
    count = panels.shape[0]
    blocks = form.unit // CODE_BLOCK
    units = panels.shape[1] // (form.head_bytes + blocks * form.block_bytes)
    heads, inner = panels.reshape(count, units, -1).split_with_sizes([form.head_bytes, blocks * form.block_bytes], -1)
    sizes = [CODE_PANEL * ITEMSIZE[kind] for kind in form.block]
    *block, vectors = inner.reshape(count, units, blocks, -1).split_with_sizes(
        [*sizes, form.block_bytes - sum(sizes)], -1)
    head = heads.split_with_sizes([CODE_PANEL * ITEMSIZE[kind] for kind in form.head], -1)

    def channels(part: Tensor, kind: str) -> Tensor:
        numbers = part.contiguous().view(getattr(torch, kind)).view(count, -1, CODE_PANEL)
        return numbers.transpose(1, 2).reshape(count * CODE_PANEL, -1)

    return Codes(form, _values(vectors, form.bits, count),
                 tuple(map(channels, block, form.block)), tuple(map(channels, head, form.head))).weight()


def _vectors(values: Tensor, bits: int, count: int) -> Tensor:
    """Reorder values [channels, columns] to the layout of native/coded/coded.h: bytes [panels, blocks, bytes]."""
    if bits == 8:
        # half, channel, block, vector, place, parity
        words = values.view(torch.uint8).reshape(count, 2, _HALF, -1, 8, 2, 2)
        return words.permute(0, 3, 1, 4, 2, 6, 5).reshape(count, words.shape[3], -1)
    words = values.reshape(count, 2, _HALF, -1, 4, 2, 2, 2)  # half, channel, block, vector, byte, nibble, parity
    words = words.permute(0, 3, 1, 4, 6, 2, 7, 5)  # panel, block, half, vector, nibble, channel, parity, byte
    low = words & 15
    planes = [(low[:, :, :, :, 0] | low[:, :, :, :, 1] << 4).flatten(3)]
    if bits > 4:
        # vectors, codes of a byte, byte
        high = (words >> 4).reshape(count, words.shape[1], 2, bits - 4, 8 // (bits - 4), 64)
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8).view(-1, 1)
        planes.append((high << shifts).sum(4, dtype=torch.uint8).flatten(3))
    return torch.cat(planes, dim=-1).flatten(2)


def _values(vectors: Tensor, bits: int, count: int) -> Tensor:
    """Reverse `_vectors`."""
    if bits == 8:
        signed = vectors.contiguous().view(torch.int8).reshape(count, -1, 2, 8, _HALF, 2, 2)
        return signed.permute(0, 2, 4, 1, 3, 6, 5).reshape(count * CODE_PANEL, -1)
    planes = vectors.reshape(count, -1, 2, 64 * bits)
    low = planes[..., :256].reshape(*planes.shape[:3], 4, 1, _HALF, 2, 2)
    words = torch.cat((low & 15, low >> 4), dim=4)  # panel, block, half, vector, nibble, channel, parity, byte
    if bits > 4:
        high = planes[..., 256:].reshape(*planes.shape[:3], bits - 4, 1, 64)
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8).view(-1, 1)
        words = words | (high >> shifts & (1 << bits - 4) - 1).flatten(3).view(words.shape) << 4
    return words.permute(0, 2, 5, 1, 3, 7, 4, 6).reshape(count * CODE_PANEL, -1)
