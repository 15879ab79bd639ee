"""The operations of a decoder layer, one object per device. A weight's format defines its products: kernels.linear."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.cpu_kernels import CpuKernels
from spillover.kernels.features import KeptRows


class LayerKernels(Protocol):
    """The two halves of a layer. Each adds its input to the residual, norms the sum, and returns the output that the
    next half adds. x and the residual may be overwritten: use only the returned tensors."""

    def attention_block(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch,
                        window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        """Compute attention, x and residual [T, hidden] -> (its output, residual + x). `layer`: index of the layer,
        which selects the blocks of an offloaded prefix."""

    def mlp_block(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """Compute the gated MLP, x and residual [T, hidden] -> (its output, residual + x)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add and norm, x and residual [T, hidden] -> (rms_norm(x + residual), x + residual)."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm x [T, width] -> [T, width]; x is not modified."""

    def attend(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch, window: int | None,
               layer: int) -> Tensor:
        """Store the keys and values of normed x [T, any width], and compute attention -> its output [T, hidden]."""

    def store(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch) -> None:
        """Store the same keys and values as `attend`, without computing attention."""

    def rows_before(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
        """Return the predecessor of each row of a step: see kernels.features."""

    def keep_rows(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
        """Keep the newest rows of each request: see kernels.features."""


def kernels_on(device: torch.device, shape: LayerShape, cos: Tensor, sin: Tensor) -> LayerKernels:
    """Return the kernels of a device, for layers of this shape and rotary tables [positions, head_dim / 2]."""
    if device.type == "cuda":
        from spillover.kernels.triton.cuda_kernels import CudaKernels  # needs Triton

        return CudaKernels(shape, cos, sin)
    return CpuKernels(shape, cos, sin)
