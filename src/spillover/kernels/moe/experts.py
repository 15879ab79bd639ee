"""The linears of a layer's experts, as the kernels of a mixture expect them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.grouped_gemm import GroupedGemm

ExpertWeights = TypedDict("ExpertWeights", {
    "experts.gate_up": Linear, "experts.gate_up_bias": Tensor, "experts.down": Linear, "experts.down_bias": Tensor,
}, total=False)


@dataclass(frozen=True)
class Experts:
    """A stack of linears and their biases."""

    weight: Linear  # [experts, out, in]
    bias: Tensor | None = None  # [experts, out]

    @property
    def values(self) -> Tensor:
        return self.weight.tensors[0]

    @property
    def scales(self) -> Tensor | None:
        return self.weight.tensors[1] if len(self.weight.tensors) > 1 else None

    @property
    def gemm(self) -> GroupedGemm:
        gemm = self.weight.format.experts
        assert gemm is not None, f"{self.weight.format} has no grouped product"
        return gemm

    @property
    def count(self) -> int:
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """Return the number of inputs of one linear."""
        return self.weight.shape.in_features

    @property
    def stride(self) -> int:
        """Return the bytes from the values of an expert to those of the next."""
        return self.values.stride(0) * self.values.element_size()

    @property
    def bias_stride(self) -> int:
        """Return the numbers from the bias of an expert to that of the next; 0 without biases."""
        return 0 if self.bias is None else self.bias.stride(0)

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's dequantised weight [out, in]."""
        return self.weight.format.dequantize(self.weight.expert(index), dtype)


def expert_stacks(w: ExpertWeights) -> tuple[Experts, Experts]:
    """Return the stacks of a layer's experts: gate_up and down with their biases."""
    return (Experts(w["experts.gate_up"], w.get("experts.gate_up_bias")),
            Experts(w["experts.down"], w.get("experts.down_bias")))
