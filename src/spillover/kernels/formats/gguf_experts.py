"""Experts in the codes of GGUF files, as a CUDA device and the host's cores multiply with them: see cuda/mixture.cu."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.gguf_codes import CodeForm, Codes, splits_blocks
from spillover.kernels.formats.grouped_gemm import GroupedGemm, invariant_tiles
from spillover.kernels.formats.grouped_int import GroupedInt, Matrix, unpack_nibbles
from spillover.kernels.formats.int_experts import STEP, IntExperts

FIRST_CODE = 9  # first FORMAT in kernels/triton/moe/moe_product.py; the others follow in the order of KINDS
HOST_CODE = 11  # likewise, in native/moe/mixture.h
KINDS = ((4, False, True), (8, False, True), (8, True, False), (8, True, True))  # bits, halves, offsets
ZERO = {4: 0, 8: 128}  # the code of 0, by bits


def experts_format(forms: Collection[CodeForm], shapes: Iterable[LinearShape]) -> WeightFormat | None:
    """Return the common format in which to keep all experts of a layer, whose matrices a file has in these forms; None
    if no grouped product supports their shapes."""
    bits = 4 if all(form.bits == 4 and not form.values and form.parts == 1 for form in forms) else 8
    halves, offsets = any(form.parts == 2 for form in forms), any(form.has_offset for form in forms)
    plain = GgufInt(bits, CODE_BLOCK, "float32")
    if not all(IntExperts.serves(plain, shape) for shape in shapes):
        return None
    unit = max(form.unit for form in forms)
    return GgufExperts(bits, halves, offsets, unit) if halves or offsets else plain


@dataclass(frozen=True)
class GgufInt(GroupedInt):
    """Codes of a GGUF file with one scale per 32 columns and no offset, as integers counted from the middle."""

    quant_method = "gguf"

    def for_part(self, shape: LinearShape, columns: tuple[int, int] | None) -> WeightFormat:
        return self if IntExperts.serves(self, shape) and not splits_blocks(columns, ()) else DENSE

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        codes = reader.read_codes(name)
        return Matrix(self.pack(_numbers(codes) + (1 << (self.bits - 1))), _scales(codes)[..., 0])


@dataclass(frozen=True)
class GgufExperts(WeightFormat):
    """A format: codes uint8 [N, K * bits / 8], with 4 bits an even column in the low half of its byte, and for every 32
    columns a scale, or with `halves` one for each 16, then with `offsets` an offset: float32 [N, numbers].
    w = scale * (code - ZERO) + offset, exactly as in the file."""

    bits: int
    halves: bool
    offsets: bool
    unit: int = field(default=CODE_BLOCK, compare=False)  # most columns that share a number in the file
    quant_method = "gguf"

    @property
    def numbers(self) -> int:
        """Return the number of scales and offsets for 32 columns."""
        return 1 + self.halves + self.offsets

    @property
    def _index(self) -> int:
        return KINDS.index((self.bits, self.halves, self.offsets))

    @cached_property
    def experts(self) -> GroupedGemm:
        tiles = invariant_tiles(STEP)
        return GroupedGemm(FIRST_CODE + self._index, None, tiles, tiles, input_dtypes={}).batch_invariant()

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        rows, columns = shape.out_features, shape.in_features
        return (Field("codes", "uint8", (rows, columns * self.bits // 8)),
                Field("scales", "float32", (rows, columns // CODE_BLOCK * self.numbers)))

    def for_part(self, shape: LinearShape, columns: tuple[int, int] | None) -> WeightFormat:
        plain = GgufInt(self.bits, CODE_BLOCK, "float32")
        return self if IntExperts.serves(plain, shape) and not splits_blocks(columns, [self.unit]) else DENSE

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        made = [self.packed_tensors(reader.read_codes(name)) for name, _ in reader.matrices]
        codes, scales = (torch.cat(parts).to(target.device) for parts in zip(*made, strict=True))
        return codes, scales

    def packed_tensors(self, codes: Codes) -> tuple[Tensor, Tensor]:
        """Return the tensors of one matrix."""
        scales = _scales(codes)
        values, numbers = _numbers(codes), [scales.expand(*scales.shape[:2], 2) if self.halves else scales]
        if self.offsets and codes.form.has_offset:
            numbers.append(_offsets(codes).unsqueeze(-1))
        elif self.offsets and self.bits == 4:  # codes begin at 0, and the offset subtracts the middle: exact
            values = values + 8
            numbers.append(scales * -8)
        elif self.offsets:
            numbers.append(torch.zeros_like(scales[..., :1]))
        packed = (values + ZERO[self.bits]).to(torch.uint8)
        if self.bits == 4:
            packed = packed[:, 0::2] | packed[:, 1::2] << 4
        return packed, torch.cat(numbers, -1).flatten(1)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        codes, scales = w.tensors
        each = scales.view(len(scales), -1, self.numbers)  # [N, blocks, numbers]
        values = (unpack_nibbles(codes) if self.bits == 4 else codes).float() - ZERO[self.bits]
        made = values.view(*each.shape[:2], 1 + self.halves, -1) * each[..., : 1 + self.halves, None]
        if self.offsets:
            made += each[..., -1, None, None]
        return made.flatten(1).to(dtype)

    def host_code(self, dtype: torch.dtype) -> int | None:
        return HOST_CODE + self._index


def _numbers(codes: Codes) -> Tensor:
    """Return the integers that scales multiply, int16 [N, K]: codes with an offset as is, others less the middle."""
    form, values = codes.form, codes.values.to(torch.int16)
    if form.values:
        return torch.tensor(form.values, dtype=torch.int16)[values.int()]
    return values if form.has_offset or form.bits == 8 else values - (1 << (form.bits - 1))


def _scales(codes: Codes) -> Tensor:
    """Return the scales, float32 [N, K / 32, parts of a block]."""
    scales = torch.stack([part.float() for part in codes.block[: codes.form.parts]], -1)
    return scales if not codes.form.head else scales * _heads(codes, 0).unsqueeze(-1)


def _offsets(codes: Codes) -> Tensor:
    """Return the offsets, float32 [N, K / 32]."""
    added = codes.block[1].float()
    return -(_heads(codes, 1) * added) if codes.form.head else added


def _heads(codes: Codes, index: int) -> Tensor:
    return codes.head[index].float().repeat_interleave(codes.form.unit // CODE_BLOCK, 1)
