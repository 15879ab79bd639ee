"""What a decoder layer computes, as one object per device. Products with a weight go by its format: kernels.linear."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch, LayerShape, LayerWeights
from spillover.kernels.cpu_kernels import CpuKernels
from spillover.kernels.features import KeptRows


class LayerKernels(Protocol):
    """The two halves of a layer. Each adds its input to the residual, norms the sum, and returns what the next half is
    to add. x and the residual may be overwritten: use only what is returned."""

    def attention_block(self, x: Tensor, residual: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch,
                        window: int | None, layer: int) -> tuple[Tensor, Tensor]:
        """Attend, x and residual [T, hidden] -> (the attention's output, residual + x). `layer`: whose blocks of a cold
        prefix to ask for."""

    def mlp_block(self, x: Tensor, residual: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """Run the MLP, x and residual [T, hidden] -> (the gated MLP's output, residual + x)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add and norm, x and residual [T, hidden] -> (rms_norm(x + residual), x + residual)."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm, x [T, width] -> [T, width]; x stays as it is."""

    def attend(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch, window: int | None,
               layer: int) -> Tensor:
        """Attend, x [T, any width], normed -> the attention's output [T, hidden]."""

    def store(self, x: Tensor, w: LayerWeights, kv_layer: Tensor, batch: AttentionBatch) -> None:
        """Store the keys and values that `attend` would, and compute nothing else."""

    def rows_before(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor, follows: Tensor) -> Tensor:
        """Return what each row of a step follows, as kernels.features."""

    def keep_rows(self, x: Tensor, kept: KeptRows, batch: AttentionBatch, slots: Tensor) -> None:
        """Keep the newest rows of each request, as kernels.features."""


def kernels_on(device: torch.device, shape: LayerShape, cos: Tensor, sin: Tensor) -> LayerKernels:
    """Choose the kernels of a device, for layers of this shape and rotary tables [positions, head_dim / 2]."""
    if device.type == "cuda":
        from spillover.kernels.triton.cuda_kernels import CudaKernels  # needs Triton

        return CudaKernels(shape, cos, sin)
    return CpuKernels(shape, cos, sin)
