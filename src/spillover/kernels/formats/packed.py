"""Panels of channels for the native kernels: float32 numbers here, codes in gguf_codes."""

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


class Panels(WeightFormat):
    """Channels in panels, one tensor; those past the last channel are zero."""

    native_codes: bool

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
        given = x.data_ptr(), w.tensors[0].data_ptr(), offset, y.data_ptr(), rows, n, k
        if self.native_codes:
            library.coded_linear(*given)
        else:
            library.linear(*given)
        return y

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        return 0

    def embedding(self, ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
        library = native.library()
        if library is None or ids.dtype is not torch.int64 or not ids.is_contiguous():
            return self.look_up(ids, w)
        y = torch.empty(ids.shape[0], w.shape.in_features)
        given = ids.data_ptr(), w.tensors[0].data_ptr(), y.data_ptr(), *y.shape
        if self.native_codes:
            library.coded_embedding(*given)
        else:
            library.embedding(*given)
        return y

    @abstractmethod
    def look_up(self, ids: Tensor, w: Linear) -> Tensor:
        """Look up rows as `embedding` does, by torch."""


@dataclass(frozen=True)
class Packed(Panels):
    """Numbers in panels [ceil(N / width), K, width], so that a vector load serves `width` channels at one k."""

    width: int
    base: Dense = DENSE  # that it is loaded as
    quant_method = "packed"
    native_codes = False

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return (Field("panels", dtype, (-(-shape.out_features // self.width), shape.in_features, self.width)),)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return (self.pack(self.base.load(reader, shape, target)[0], target.arena),)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        if not experts:
            return (self.pack(self.base.dummy(shape, 0, target, random)[0], target.arena),)
        stack = torch.empty(experts, *self.fields(shape, target.dtype)[0].shape)
        for panels in stack:  # one at a time, so that no second copy of the stack is held
            panels.copy_(self.pack(self.base.dummy(shape, 0, target, random)[0]))
        return (stack,)

    def pack(self, weight: Tensor, arena: Arena | None = None) -> Tensor:
        """Pack weight [N, K] -> panels."""
        n, k = weight.shape
        width, whole = self.width, n // self.width
        count = -(-n // width)
        panels = torch.empty(count, k, width) if arena is None else arena.empty(count, k, width)
        panels[:whole] = weight[: whole * width].view(whole, width, k).transpose(1, 2)
        if whole < count:
            panels[whole, :, : n - whole * width] = weight[whole * width :].T
            panels[whole, :, n - whole * width :] = 0
        return panels

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        count, k, width = w.tensors[0].shape
        return w.tensors[0].transpose(1, 2).reshape(count * width, k)[: w.shape.out_features]

    def look_up(self, ids: Tensor, w: Linear) -> Tensor:
        return w.tensors[0][ids // self.width, :, ids % self.width]


def pack(weight: Tensor) -> Linear:
    """Return the form in which [N, K] is multiplied fastest: panels where native kernels serve it, else as it is."""
    shape = LinearShape((weight.shape[0],), weight.shape[1])
    library = native.library()
    if library is None or not native.serves(weight):
        return Linear(DENSE, shape, (weight,))
    form = Packed(library.panel_width())
    return Linear(form, shape, (form.pack(weight),))
