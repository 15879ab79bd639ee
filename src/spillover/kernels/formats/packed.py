"""Panels of channels for the native kernels: float32 weights here, codes in gguf_codes, FP8 in fp8_panels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.arena import Arena
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.dense import DENSE, Dense

FLOATS, CODES, FP8 = range(3)  # kinds of panels, as numbered in native/products.h
BYTES_AT_ONCE = 16 << 20  # bytes of a matrix that are widened at a time


class Panels(WeightFormat):
    """A format of one tensor, panels of channels; those past the last channel are zero."""

    panel_kind: int

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        library = native.library()
        if library is None or x.dtype is not torch.float32:
            return F.linear(x, self.dequantize(w, x.dtype), bias)
        rows, k = x.shape
        n = w.shape.out_features
        if k != w.shape.in_features or (bias is not None and bias.shape[0] != n):
            raise ValueError(f"x is {tuple(x.shape)} but the weight {(n, w.shape.in_features)}")
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty(rows, n)
        offset = bias.data_ptr() if bias is not None else None
        product = (library.linear, library.coded_linear, library.fp8_linear)[self.panel_kind]
        product(x.data_ptr(), w.tensors[0].data_ptr(), offset, y.data_ptr(), rows, n, k)
        return y

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        return 0

    def embedding(self, ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
        library = native.library()
        if library is None or ids.dtype is not torch.int64 or not ids.is_contiguous():
            return self.embedding_lookup(ids, w)
        y = torch.empty(ids.shape[0], w.shape.in_features)
        given = ids.data_ptr(), w.tensors[0].data_ptr(), y.data_ptr(), *y.shape
        if self.panel_kind == CODES:
            library.coded_embedding(*given)
        else:
            library.embedding(*given)
        return y

    @abstractmethod
    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        """Look up rows as `embedding` does, with torch."""


@dataclass(frozen=True)
class Packed(Panels):
    """Plain weights in panels [ceil(N / width), K, width], so that a vector load has `width` channels of one k."""

    width: int
    base: Dense = DENSE  # format in which it is loaded
    quant_method = "packed"
    panel_kind = FLOATS

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("panels", dtype, (-(-shape.out_features // self.width), shape.in_features, self.width)),)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        panels, start = self._allocate(shape.out_features, shape.in_features, target.arena), 0
        for name, rows in reader.matrices:  # matrix by matrix, so that no second copy of all of them is held
            self._fill(panels, start, self.base.matrix(reader, name, rows, shape.in_features))
            start += rows
        return (panels,)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        if not experts:
            return (self.pack(self.base.dummy(shape, 0, target, random)[0], target.arena),)
        stack = torch.empty(experts, *self.fields(shape, target.dtype)[0].shape)
        for panels in stack:  # one at a time, so that no second copy of the stack is held
            panels.copy_(self.pack(self.base.dummy(shape, 0, target, random)[0]))
        return (stack,)

    def pack(self, weight: Tensor, arena: Arena | None = None) -> Tensor:
        """Pack weight [N, K] -> panels."""
        panels = self._allocate(weight.shape[0], weight.shape[1], arena)
        self._fill(panels, 0, weight)
        return panels

    def _allocate(self, n: int, k: int, arena: Arena | None) -> Tensor:
        """Allocate panels for [N, K], whose channels past the last are zero and others uninitialised."""
        count = -(-n // self.width)
        panels = torch.empty(count, k, self.width) if arena is None else arena.empty(count, k, self.width)
        if n % self.width:
            panels[-1, :, n % self.width :] = 0
        return panels

    def _fill(self, panels: Tensor, start: int, weight: Tensor) -> None:
        """Write weight [rows, K] of any floating type to the channels from `start` on, a few rows at a time."""
        width, k, done = self.width, weight.shape[1], 0
        rows_at_once = max(1, BYTES_AT_ONCE // (4 * k * width)) * width
        while done < len(weight):
            panel, lane = divmod(start + done, width)
            if lane or len(weight) - done < width:  # a panel shared with another matrix, or the last one
                rows = min(width - lane, len(weight) - done)
                panels[panel, :, lane : lane + rows] = weight[done : done + rows].T
            else:
                rows = min(rows_at_once, (len(weight) - done) // width * width)
                part = weight[done : done + rows].to(panels.dtype)
                panels[panel : panel + rows // width] = part.reshape(-1, width, k).transpose(1, 2)
            done += rows

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        count, k, width = w.tensors[0].shape
        return w.tensors[0].transpose(1, 2).reshape(count * width, k)[: w.shape.out_features]

    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        return w.tensors[0][ids // self.width, :, ids % self.width]


def pack(weight: Tensor) -> Linear:
    """Return weight [N, K] in its fastest format: panels if the native kernels support it, otherwise dense."""
    shape = LinearShape((weight.shape[0],), weight.shape[1])
    library = native.library()
    if library is None or not native.serves(weight):
        return Linear(DENSE, shape, (weight,))
    weight_format = Packed(library.panel_width())
    return Linear(weight_format, shape, (weight_format.pack(weight),))
