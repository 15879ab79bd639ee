"""The linears of a layer's experts, in the form they are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels import fp8, mxfp4


@dataclass(frozen=True)
class Experts:
    """A stack of linears [experts, out, in] in the form it is kept in.

    dense: values in the engine's type [E, N, K]. fp8: values float8_e4m3fn [E, N, K] and float32 scales, one a block of
    128 x 128 [E, blocks of N, blocks of K]; gate and up were quantised apart, so each begins a block of its own.
    mxfp4: values uint8 [E, N, K / 2] and scales uint8 with their rows padded, [E, N, mxfp4.padded(K / 32)].
    """

    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None  # [E, N]

    @property
    def format(self) -> str:
        if self.scales is None:
            return "dense"
        return "mxfp4" if self.values.dtype is torch.uint8 else "fp8"

    @property
    def count(self) -> int:
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """Inputs of one linear."""
        return self.values.shape[2] * (2 if self.format == "mxfp4" else 1)

    def expert(self, index: int, dtype: torch.dtype, parts: int = 1) -> Tensor:
        """One linear, widened; `parts`: matrices below each other that were quantised apart."""
        values, scales = self.values[index], None if self.scales is None else self.scales[index]
        if scales is None:
            return values
        if self.format == "mxfp4":
            groups = values.shape[1] * 2 // mxfp4.GROUP
            return mxfp4.dequantize(values.view(values.shape[0], groups, -1), scales, dtype)
        pieces = zip(values.chunk(parts), scales.chunk(parts), strict=True)
        return torch.cat([fp8.dequantize(value, scale, dtype) for value, scale in pieces])
