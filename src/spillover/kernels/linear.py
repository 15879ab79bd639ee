"""Matrix products with a model's weights, and the embedding that looks rows of one up, each by its weight's format."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels.formats.base import Linear, Weight


def linear(x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
    """Multiply, x [T, K], w [N, K], bias [N] -> [T, N]."""
    return w.format.linear(x, w, bias)


def embedding(ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look up rows, ids [T], w [V, K] -> [T, K]; of `dtype` where it is not kept as numbers."""
    return w.format.embedding(ids, w, dtype)


def unpack(w: Weight) -> Tensor:
    """Return the plain [N, K] weight again."""
    return w if isinstance(w, Tensor) else w.format.dequantize(w, torch.float32)


def linear_reference(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpack(w), bias)


def embedding_reference(ids: Tensor, w: Weight) -> Tensor:
    return F.embedding(ids, unpack(w))
