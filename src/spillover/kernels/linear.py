"""Matrix products with a model's weights, and the embedding that looks rows of one up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.arena import Arena
from spillover.kernels.coded import CodedWeight, PanelWeight, embedded_codes, unpack_codes


class PackedWeight(PanelWeight):
    """In numbers: panels [ceil(N / P), K, P], so that one vector load serves P channels at one k."""

    @property
    def bits(self) -> int:
        return 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.panels.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype


@dataclass(frozen=True)
class FixedWeight:
    """A [N, K] weight on a CUDA device whose sums have one order, whatever the number of rows it is multiplied with."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


Weight = Tensor | PackedWeight | CodedWeight | FixedWeight


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K], w [N, K], bias [N] -> [T, N]."""
    if isinstance(w, FixedWeight):
        from spillover.kernels.triton.fixed_linear import fixed_linear

        return fixed_linear(x, w.data, bias)
    if x.is_cuda and x.shape[0] == 1 and isinstance(w, Tensor):
        from spillover.kernels.triton.gemv import gemv

        return gemv(x, w, bias)
    library = native.library()
    if isinstance(w, Tensor) or library is None or x.dtype is not torch.float32:
        return linear_reference(x, w, bias)
    rows, k = x.shape
    if k != w.shape[1] or (bias is not None and bias.shape[0] != w.out_features):
        raise ValueError(f"x is {tuple(x.shape)} but the weight {w.shape}")
    if not x.is_contiguous():
        x = x.contiguous()
    y = torch.empty(rows, w.out_features)
    offset = bias.data_ptr() if bias is not None else None
    given = (x.data_ptr(), w.panels.data_ptr(), offset, y.data_ptr(), rows, w.out_features, k)
    if isinstance(w, CodedWeight):
        library.coded_linear(*given, w.bits)
    else:
        library.linear(*given)
    return y


def embedding(ids: Tensor, w: Weight) -> Tensor:
    """ids [T], w [V, K] -> [T, K]."""
    library = native.library()
    if not isinstance(w, PanelWeight) or library is None or ids.dtype is not torch.int64 or not ids.is_contiguous():
        return embedding_reference(ids, w)
    k = w.shape[1]
    y = torch.empty(ids.shape[0], k)
    given = (ids.data_ptr(), w.panels.data_ptr(), y.data_ptr(), ids.shape[0], k)
    if isinstance(w, CodedWeight):
        library.coded_embedding(*given, w.bits)
    else:
        library.embedding(*given)
    return y


def pack(weight: Tensor, arena: Arena | None = None) -> Tensor | PackedWeight:
    """The form `linear` is fastest on: panels where the native kernels serve this weight, else the weight itself.

    `arena` is where panels that stay are to lie.
    """
    library = native.library()
    if library is None or not native.serves(weight):
        return weight
    n, k = weight.shape
    width = library.panel_width()
    count = -(-n // width)
    panels = torch.empty(count, k, width) if arena is None else arena.empty(count, k, width)
    whole = n // width
    panels[:whole] = weight[: whole * width].view(whole, width, k).transpose(1, 2)
    if whole < count:
        panels[whole, :, : n - whole * width] = weight[whole * width :].T
        panels[whole, :, n - whole * width :] = 0
    return PackedWeight(panels, n)


def unpack(w: Weight) -> Tensor:
    """The plain [N, K] weight again."""
    if isinstance(w, Tensor):
        return w
    if isinstance(w, FixedWeight):
        return w.data
    if isinstance(w, CodedWeight):
        return unpack_codes(w)
    count, k, width = w.panels.shape
    return w.panels.transpose(1, 2).reshape(count * width, k)[: w.out_features]


def linear_reference(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpack(w), bias)


def embedding_reference(ids: Tensor, w: Weight) -> Tensor:
    if isinstance(w, CodedWeight):
        return embedded_codes(ids, w)
    if not isinstance(w, PackedWeight):
        return F.embedding(ids, unpack(w))
    width = w.panels.shape[2]
    return w.panels[ids // width, :, ids % width]
