"""FP8 weights that cuda/fp8_linear.py multiplies with activations rounded to FP8, for a CUDA device with wgmma."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from spillover.kernels.cuda import fp8_linear as cuda
from spillover.kernels.cuda.driver.tensor_map import TYPES, capable
from spillover.kernels.cuda.fp8_linear import STEP, Shape
from spillover.kernels.fields import FLOATING, Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, TensorReader, WeightFormat
from spillover.kernels.formats.checkpoints.settings import module_of
from spillover.kernels.formats.fp8 import Fp8Format
from spillover.kernels.formats.fp8_block import BLOCK

log = logging.getLogger("spillover.kernels")

DUMMY_INPUT_SCALE = 0.02


@dataclass(frozen=True)
class Fp8Cuda(WeightFormat):
    """A format: the tensors of `base`, and the scale [1] of its inputs if the checkpoint has one. A row has the same
    bits whatever the other rows."""

    base: Fp8Format
    quant_method = "fp8_cuda"

    @classmethod
    def of(cls, base: Fp8Format, shape: LinearShape) -> Fp8Cuda | None:
        """Return the format for a linear; None if activations must not be rounded, the matrix does not consist of whole
        tiles, or a tile would have weights with different scales."""
        if base.activations == "none" or not _device_supported():
            return None
        whole = not base.blocked or all(size % BLOCK == 0 for size in shape.output_sizes[:-1])
        return cls(base) if whole and cuda.fits(shape.out_features, shape.in_features) else None

    @property
    def _static(self) -> bool:
        return self.base.activations == "static"

    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        given = (Field("input_scale", "float32", (1,)),) if self._static else ()
        return (*self.base.fields(shape, dtype), *given)

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        return self.base.stored(name, rows, columns)

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        tensors = self.base.load_or_round(reader, shape, target)
        if not self._static:
            return tensors
        scales = [reader.read(Field(f"{module_of(name)}.input_scale", FLOATING, (1,), squeezed=True)).float()
                  for name, _ in reader.matrices]
        return *tensors, torch.stack(scales).amax(0).to(target.device)

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        given = [torch.full((1,), DUMMY_INPUT_SCALE, device=target.device)] if self._static else []
        return (*self.base.dummy(shape, 0, target, random), *given)

    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        return self.base.dequantize(Linear(self.base, w.shape, w.tensors[:2]), dtype)

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        if getattr(torch, dtype) not in TYPES:
            return super().scratch_bytes(shape, dtype)
        return cuda.ROWS_AT_ONCE * (shape.in_features + 4 * -(-shape.in_features // STEP))

    def prepare(self, linears: Sequence[tuple[LinearShape, bool]], target: Target, most_rows: int) -> None:
        dtype = getattr(torch, target.dtype)
        if not cuda.available(dtype, target.device):
            return
        _log_rounding()
        shapes = [Shape(shape.out_features, shape.in_features, self.base.blocked, gated, normed) for shape, _ in linears
                  for gated, normed in self._uses(shape)]
        cuda.prepare(shapes, dtype, target.device, most_rows)

    def batch_invariant(self) -> WeightFormat:
        return self

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        if cuda.available(x.dtype, x.device):
            return self._multiply(x, w, bias, False)
        from spillover.kernels.triton.ordered_linear import ordered_linear

        return ordered_linear(x, self.dequantize(w, x.dtype), bias)

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        if self._in_pairs(w.shape) and cuda.available(x.dtype, x.device):
            return self._multiply(x, w, bias, True)
        return super().linear_silu(x, w, bias)

    def add_norm_linear(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, w: Linear,
                        bias: Tensor | None = None, gated: bool = False) -> tuple[Tensor, Tensor]:
        if (not gated or self._in_pairs(w.shape)) and cuda.available(x.dtype, x.device):
            made = cuda.add_norm_fp8_linear(x, residual, norm, eps, *self._arguments(x, w, bias, gated))
            if made is not None:
                return made
        return super().add_norm_linear(x, residual, norm, eps, w, bias, gated)

    def _multiply(self, x: Tensor, w: Linear, bias: Tensor | None, gated: bool) -> Tensor:
        return cuda.fp8_linear(x, *self._arguments(x, w, bias, gated))

    def _arguments(self, x: Tensor, w: Linear, bias: Tensor | None,
                   gated: bool) -> tuple[Tensor, Tensor, Tensor | None, bool, Tensor | None, bool]:
        """Return the arguments of the products after the rows."""
        from spillover.kernels.triton.launch import pdl_options

        given = w.tensors[2] if self._static else None
        return w.tensors[0], w.tensors[1], bias, gated, given, pdl_options(x.device)["EARLY"]

    def _uses(self, shape: LinearShape) -> list[tuple[bool, bool]]:
        """Return whether a product is gated and normed, for each way in which layers use it: only fused matrices follow
        a norm."""
        if self._in_pairs(shape):
            return [(False, False), (True, False), (True, True)]
        return [(False, False), (False, True)] if len(shape.output_sizes) > 1 else [(False, False)]

    def _in_pairs(self, shape: LinearShape) -> bool:
        """Return whether the matrices are a gate and the one it gates, of sizes for a gated product."""
        sizes = shape.output_sizes
        return len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] % (STEP if self.base.blocked else 32) == 0


@cache
def _device_supported() -> bool:
    """Return whether the CUDA device supports these products; without a device, a plan assumes that it does."""
    return not torch.cuda.is_available() or capable(torch.device("cuda", torch.cuda.current_device()))


@cache
def _log_rounding() -> None:
    log.info("FP8 weights are multiplied as FP8: activations are rounded to e4m3 before each product")
