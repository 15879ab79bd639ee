"""MXFP4 in the panels that native/coded/coded.cpp multiplies with, for a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader
from spillover.kernels.formats.gguf_codes import CODE_FORMS, Codes, GgufCodes, pack_codes, unpack_codes
from spillover.kernels.formats.grouped_int import unpack_nibbles
from spillover.kernels.formats.mxfp4 import GROUP, Mxfp4, halved_scales
from spillover.kernels.formats.packed import CODES, Panels

FORM = CODE_FORMS["MXFP4"]


@dataclass(frozen=True)
class Mxfp4Panels(Panels):
    """A format: panels of the codes of `base`, each block of which has a scale."""

    base: Mxfp4
    quant_method = "mxfp4_panels"
    panel_kind = CODES

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        return _panels(shape).fields(shape, dtype)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        return self.packed_tensors(shape, self.base.load(reader, shape, replace(target, arena=None)))

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        made = [self.packed_tensors(shape, self.base.dummy(shape, 0, target, random)) for _ in range(experts or 1)]
        return tuple(map(torch.stack, zip(*made, strict=True))) if experts else made[0]

    def packed_tensors(self, shape: LinearShape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors of this format, made from those of MXFP4."""
        values, scales = tensors
        whole = unpack_nibbles(values), halved_scales(scales[:, : shape.in_features // GROUP])
        parts = zip(*(tensor.split_with_sizes(shape.output_sizes) for tensor in whole), strict=True)
        return pack_codes([Codes(FORM, codes, (numbers,)) for codes, numbers in parts]).tensors

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return unpack_codes(_coded(w)).to(dtype)

    def embedding_lookup(self, ids: Tensor, w: Linear) -> Tensor:
        return _panels(w.shape).embedding_lookup(ids, _coded(w))


def _panels(shape: LinearShape) -> GgufCodes:
    return GgufCodes((FORM,) * len(shape.output_sizes))


def _coded(w: Linear) -> Linear:
    return Linear(_panels(w.shape), w.shape, w.tensors)
