"""MXFP4 and NVFP4 in the panels that native/coded/coded.cpp multiplies with, for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.arena import Arena
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader
from spillover.kernels.formats.gguf_codes import (
    CODE_FORMS,
    CodeForm,
    Codes,
    GgufCodes,
    nvfp4_form,
    pack_codes,
    unpack_codes,
)
from spillover.kernels.formats.grouped_int import unpack_nibbles
from spillover.kernels.formats.mxfp4 import GROUP, Mxfp4, halved_scales
from spillover.kernels.formats.nvfp4 import Nvfp4
from spillover.kernels.formats.packed import CODES, Panels


@dataclass(frozen=True)
class Fp4Panels(Panels):
    """A format: panels of the codes of `base`, as indices of doubled values, and its scales, of which MXFP4's and the
    global ones of NVFP4 make up for the doubling. Dequantised, they have the bits of `base`, unless the product of two
    scales of NVFP4 is no normal float32 number."""

    base: Mxfp4 | Nvfp4
    quant_method = "fp4_panels"
    panel_kind = CODES

    @classmethod
    def serves(cls, shape: LinearShape) -> bool:
        """Return whether a linear can be kept in this format here."""
        return native.multiplies_codes() and shape.in_features % CODE_BLOCK == 0

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return self._panels(shape).fields(shape, dtype)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load(reader, shape, target), target.arena)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        made = [self.packed_tensors(shape, self.base.dummy(shape, 0, target, random)) for _ in range(experts or 1)]
        return tuple(map(torch.stack, zip(*made, strict=True))) if experts else made[0]

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...],
                       arena: Arena | None = None) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made from those of `base`. `arena`: allocator of panels that stay in
        memory."""
        return pack_codes([self._codes(shape, tensors)], arena).tensors

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return unpack_codes(self._coded(w)).to(dtype)

    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        return self._panels(w.shape).embedding_lookup(ids, self._coded(w))

    def _panels(self, shape: LinearShape) -> GgufCodes:
        return GgufCodes((self._form(shape.in_features),) * len(shape.output_sizes))

    def _coded(self, w: Linear) -> Linear:
        return Linear(self._panels(w.shape), w.shape, w.tensors)

    def _form(self, columns: int) -> CodeForm:
        return CODE_FORMS["MXFP4"] if isinstance(self.base, Mxfp4) else nvfp4_form(columns, self.base.divides)

    def _codes(self, shape: LinearShape, tensors: tuple[Tensor, ...]) -> Codes:
        """Return all rows of the fused matrices, which are of one form, as one weight."""
        form, values, scales = self._form(shape.in_features), unpack_nibbles(tensors[0]), tensors[1]
        if isinstance(self.base, Mxfp4):
            return Codes(form, values, (halved_scales(scales[:, : shape.in_features // GROUP]),))
        head = tensors[2].repeat_interleave(torch.tensor(shape.output_sizes)) * (2 if self.base.divides else 0.5)
        # The native product has no code for a scale that is NaN; with such a head the output is NaN as well.
        head[scales.float().isnan().any(1)] = torch.nan
        return Codes(form, values, (scales[:, 0::2], scales[:, 1::2]), (head.unsqueeze(1),))
