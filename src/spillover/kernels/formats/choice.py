"""Checkpoints whose linears are in several formats, and linears that are dequantised when they are loaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.checkpoints.settings import is_head_or_router, module_of
from spillover.kernels.formats.dense import DENSE, Dense

if TYPE_CHECKING:
    from spillover.kernels.formats.gguf_codes import Codes


class FormatChoice(WeightFormat):
    """A checkpoint's choice of a format for each of its linears; no weight is kept in the choice itself."""

    @abstractmethod
    def stored_as(self, module: str) -> WeightFormat:
        """Return the format of a module's matrix; DENSE where it is not quantised."""

    def for_linear(self, name: str) -> WeightFormat:
        found = self.stored_as(module_of(name))
        if found.keeps_linears:
            return found
        # Checkpoints have heads and routers wide, even if their configuration does not say so; others may be rounded.
        return Dequantized(self) if is_head_or_router(name) else Dequantized(self, found)

    def for_experts(self, names: Sequence[str]) -> WeightFormat:
        found = {self.stored_as(module_of(name)) for name in names}
        return found.pop().for_experts(names) if len(found) == 1 else Dequantized(self)

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        raise TypeError(f"no weight is kept in {self.quant_method} itself")

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        raise TypeError(f"no weight is kept in {self.quant_method} itself")


@dataclass(frozen=True)
class Dequantized(Dense):
    """Plain weights, dequantised when they are loaded: each matrix from the format that `base` gives for it. A matrix
    that a checkpoint did not quantise, though its configuration says so, is loaded as it is."""

    base: WeightFormat = DENSE
    weight_format: WeightFormat | None = None  # common format of all matrices, which a device may keep; None: none

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        """Return what the matrices' own format becomes, if it has panels; else those of float32."""
        kept = self.weight_format and self.weight_format.packed(width, shape)
        return kept if kept and kept != self.weight_format else super().packed(width, shape)

    def on_cuda(self, shape: LinearShape) -> WeightFormat:
        kept = self.weight_format and self.weight_format.on_cuda(shape)
        return kept if kept and kept != self.weight_format else self

    @property
    def dequantized_from(self) -> WeightFormat:
        return self.base

    def stored_as(self, module: str) -> WeightFormat:
        return self.base.stored_as(module)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """Return the first tensor alone, as the others may be missing."""
        return self.stored_as(module_of(name)).stored(name, rows, columns)[:1]

    def readable(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        listed = self.stored_as(module_of(name)).readable(name, rows, columns)
        plain = Field(name, FLOATING, (rows, columns))
        return listed if any(tensor.name == name for tensor in listed) else (*listed, plain)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        (field,) = self.fields(shape, target.dtype)
        whole = torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=target.device)
        parts = whole.split_with_sizes([rows for _, rows in reader.matrices])
        for (name, rows), part in zip(reader.matrices, parts, strict=True):
            part.copy_(self.matrix(reader, name, rows, shape.in_features))
        return (whole,)

    def matrix(self, reader: TensorReader, name: str, rows: int, columns: int) -> Tensor:
        stored = self.stored_as(module_of(name))
        if stored == DENSE or (reader.has(name) and reader.dtype(name).is_floating_point
                               and reader.dtype(name).itemsize > 1):
            return reader.read(Field(name, FLOATING, (rows, columns)))
        shape = LinearShape((rows,), columns)
        tensors = stored.load(OneMatrix(reader, name, rows), shape, Target("float32", torch.device("cpu")))
        return stored.dequantize(Linear(stored, shape, tensors), torch.float32)


class OneMatrix:
    """A TensorReader of one of the matrices of another reader."""

    def __init__(self, reader: TensorReader, name: str, rows: int) -> None:
        self.matrices: Sequence[tuple[str, int]] = [(name, rows)]
        self._reader = reader

    def has(self, name: str) -> bool:
        return self._reader.has(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(name)

    def tensor_error(self, name: str, what: str) -> CheckpointError:
        return self._reader.tensor_error(name, what)

    def read(self, tensor: Field) -> Tensor:
        return self._reader.read(tensor)

    def read_codes(self, name: str) -> Codes:
        return self._reader.read_codes(name)
