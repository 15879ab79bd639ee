"""Matrix products with a model's weights, and embedding lookups, computed by the code of the weight's format."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.formats.base import Linear, Weight


def linear(x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] by w [N, K] and add bias [N] -> [T, N]."""
    return w.format.linear(x, w, bias)


def embedding(ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look up rows ids [T] of w [V, K] -> [T, K]; in `dtype` if w is quantised."""
    return w.format.embedding(ids, w, dtype)


def unpack(w: Weight) -> Tensor:
    """Return the weight as a plain tensor [N, K]."""
    return w if isinstance(w, Tensor) else w.format.dequantize(w, torch.float32)


def linear_reference(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpack(w), bias)


def embedding_reference(ids: Tensor, w: Weight) -> Tensor:
    return F.embedding(ids, unpack(w))
