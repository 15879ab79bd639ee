"""What a decoder layer computes, as one object per device. Products with a weight go by its format: kernels.linear."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.cpu_kernels import CpuKernels


class LayerKernels(Protocol):
    """The two halves of a layer. Each adds its input to the residual, norms the sum, and returns what the next half is
    to add. x and the residual may be overwritten: use only what is returned."""

    def attention_block(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch,
                        window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        """x and residual [T, hidden] -> (the attention's output, residual + x). `layer`: whose blocks of a cold prefix
        to ask for."""

    def mlp_block(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """x and residual [T, hidden] -> (the gated MLP's output, residual + x)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, hidden] -> (rms_norm(x + residual), x + residual)."""


def kernels_on(device: torch.device, shape: LayerShape, cos: Tensor, sin: Tensor) -> LayerKernels:
    """Choose the kernels of a device, for layers of this shape and rotary tables [positions, head_dim / 2]."""
    if device.type == "cuda":
        from spillover.kernels.triton.cuda_kernels import CudaKernels  # needs Triton

        return CudaKernels(shape, cos, sin)
    return CpuKernels(shape, cos, sin)
