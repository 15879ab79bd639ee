"""Integers of 4 or 8 bits in groups that share a scale: what AWQ, GPTQ and compressed-tensors files hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import DUMMY_STD, Linear, Target, TensorReader, WeightFormat
from spillover.kernels.quantize import round_to_int


@dataclass(frozen=True)
class Matrix:
    """One matrix [N, K] of a checkpoint, with tensors like GroupedInt's fields, but columns in their original order."""

    codes: Tensor  # uint8 [N, K * bits / 8]
    scales: Tensor  # [N, groups], of any floating type
    zeros: Tensor | None = None  # uint8 [N, groups]
    group_of: Tensor | None = None  # int32 [K]: group of each column if they are in activation order
    scales_name: str = ""  # names of the tensors, for error messages
    order_name: str = ""


@dataclass(frozen=True)
class GroupedInt(WeightFormat):
    """A format: w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], g = k // group.

    Fields: codes uint8 [N, K * bits / 8], with 4 bits an even column in the low half of its byte; scales [N, groups];
    zeros uint8 [N, groups] if it has `zeros`, else all are 2**(bits - 1); order int32 [fused matrices, K] if it is
    `ordered`: column j of the codes is column order[j] of the weight, for each fused matrix separately.
    """

    bits: int = 4  # bits of a code: 4 or 8
    group: int = 128  # columns that share a scale (the last group may have fewer); 0: all columns of a row
    scale_dtype: str = "float16"
    zeros: bool = False
    ordered: bool = False
    quant_method = "grouped_int"

    def groups(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        rows, columns = shape.out_features, shape.in_features
        groups = self.groups(columns)
        listed = [Field("codes", "uint8", (rows, columns * self.bits // 8)),
                  Field("scales", self.scale_dtype, (rows, groups))]
        if self.zeros:
            listed.append(Field("zeros", "uint8", (rows, groups)))
        if self.ordered:
            listed.append(Field("order", "int32", (len(shape.output_sizes), columns)))
        return tuple(listed)

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        """Read one matrix; subclasses implement this for the way in which a checkpoint stores it."""
        raise NotImplementedError

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        whole = {field.name: torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
                 for field in self.fields(shape, target.dtype)}
        start = 0
        for index, (name, rows) in enumerate(reader.matrices):
            matrix, taken = self.read_matrix(reader, name, rows, shape.in_features), slice(start, start + rows)
            codes = matrix.codes
            if self.ordered:
                order = self._order(reader, matrix, shape.in_features)
                codes = self.pack(self.unpack(codes)[:, order])
                whole["order"][index] = order
            whole["codes"][taken] = codes
            whole["scales"][taken] = self._scales(reader, matrix)
            if self.zeros:
                whole["zeros"][taken] = 1 << (self.bits - 1) if matrix.zeros is None else matrix.zeros
            start += rows
        return tuple(whole.values())

    def _order(self, reader: TensorReader, matrix: Matrix, columns: int) -> Tensor:
        """Return the columns sorted by their group."""
        assert matrix.group_of is not None
        order = matrix.group_of.argsort(stable=True)
        if not torch.equal(matrix.group_of[order].long(), self._group_of_sorted(columns)):
            raise reader.tensor_error(matrix.order_name, f"does not say which {self.group} columns each group has")
        return order

    def is_in_order(self, group_of: Tensor) -> bool:
        """Return whether groups consist of adjacent columns, in order."""
        return torch.equal(group_of.long(), self._group_of_sorted(len(group_of)))

    def _group_of_sorted(self, columns: int) -> Tensor:
        return torch.arange(columns) // (self.group or columns)

    def _scales(self, reader: TensorReader, matrix: Matrix) -> Tensor:
        kept = matrix.scales.to(getattr(torch, self.scale_dtype))
        if not torch.equal(kept.float(), matrix.scales.float()):
            stored = str(matrix.scales.dtype).removeprefix("torch.")
            raise reader.tensor_error(matrix.scales_name, f"holds {stored} scales that {self.scale_dtype} cannot hold")
        return kept

    def dummy_tensor(self, field: Field, device: torch.device, random: torch.Generator) -> Tensor:
        dtype = getattr(torch, field.dtype)
        if field.name == "order":
            return torch.arange(field.shape[-1], dtype=dtype, device=device).expand(field.shape).contiguous()
        if field.name == "zeros":
            return torch.full(field.shape, 1 << (self.bits - 1), dtype=dtype, device=device)
        if field.name == "scales":
            spread = DUMMY_STD * 12**0.5 / (1 << self.bits)  # mean scale, for codes that are all equally likely
            made = torch.empty(field.shape, device=device)
            return made.uniform_(0.5 * spread, 1.5 * spread, generator=random).to(dtype)
        codes = torch.randint(0, 256, field.shape, dtype=dtype, device=device, generator=random)
        for mask, middle in ((15, 8), (240, 128)) if self.bits == 4 else ((255, 128),):
            codes += (codes & mask == 0) * middle  # without the lowest code, the mean of codes is the middle one
        return codes

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes uint8 [N, K] -> [N, K * bits / 8]."""
        return codes[:, 0::2] | codes[:, 1::2] << 4 if self.bits == 4 else codes

    def unpack(self, codes: Tensor) -> Tensor:
        """Undo `pack`."""
        return unpack_nibbles(codes) if self.bits == 4 else codes

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        columns = w.shape.in_features
        tensors = dict(zip((field.name for field in self.fields(w.shape, "float32")), w.tensors, strict=True))
        made = torch.empty(w.shape.out_features, columns, dtype=dtype, device=w.device)
        for index, rows in w.shape.row_chunks():
            zeros = tensors["zeros"][rows] if self.zeros else None
            numbers = self._numbers(tensors["codes"][rows], tensors["scales"][rows], zeros, columns)
            if self.ordered:
                numbers = torch.empty_like(numbers).index_copy_(1, tensors["order"][index].long(), numbers)
            made[rows] = numbers
        return made

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.grouped_panels import GroupedPanels

        return GroupedPanels(self) if native.multiplies_codes() and GroupedPanels.serves(self, shape) else self

    def on_cuda(self, shape: LinearShape) -> WeightFormat:
        from spillover.kernels.formats.coded_cuda import CodedCuda

        return CodedCuda(self) if CodedCuda.serves(self, shape) else self

    def experts_on_cuda(self, shape: LinearShape) -> WeightFormat | None:
        from spillover.kernels.formats.int_experts import IntExperts

        return IntExperts(self) if IntExperts.serves(self, shape) else None

    def _numbers(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, columns: int) -> Tensor:
        """Return the dequantised rows, float32 [n, K], with columns in the order of the codes."""
        groups = self.groups(columns)
        group = self.group or columns
        numbers = F.pad(self.unpack(codes).float(), (0, groups * group - columns)).view(-1, groups, group)
        numbers -= float(1 << (self.bits - 1)) if zeros is None else zeros.float().unsqueeze(-1)
        numbers *= scales.float().unsqueeze(-1)
        return numbers.flatten(1)[:, :columns]


@dataclass(frozen=True)
class RoundedInt(GroupedInt):
    """The same format for a matrix that the checkpoint has unquantised, rounded while it is loaded."""

    quant_method = "rounded_int"

    def read_matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Matrix:
        (stored,) = self.stored(name, rows, columns)
        rounded = round_to_int(reader.read(stored), self.bits, self.group or columns,
                               getattr(torch, self.scale_dtype))
        raised = rounded.codes.view(torch.uint8) + (1 << (self.bits - 1))  # wraps around, as bytes do
        return Matrix(self.pack(raised), rounded.scales)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """Unpack uint8 [..., n] -> [..., 2n], the low half of a byte first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def words_as_bytes(words: Tensor) -> Tensor:
    """Return int32 [..., n] as uint8 [..., 4n], the low byte first."""
    return words.contiguous().view(torch.uint8)
