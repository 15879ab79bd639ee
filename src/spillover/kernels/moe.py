"""A mixture of experts: from the router's scores to the sum, and on the CPU row groups, each expert called once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels import fp8, mxfp4
from spillover.kernels.activation import clamped_swiglu_reference, silu_and_mul_reference
from spillover.kernels.linear import linear_reference


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


def mixture(
    x: Tensor, scores: Tensor, first: Experts, second: Experts, k: int, renormalize: bool, limit: float | None = None,
    fixed: bool = False,
) -> Tensor:
    """x [T, H], scores [T, E] -> [T, H]: every token through the k experts it scores highest.

    `first` [E, 2I, H] and `second` [E, H, I] are the experts' two products. With a `limit` the activation is the
    clamped SwiGLU over rows of gate and up in turn, without it SiLU-mul over gate rows and then up rows. `fixed`: a
    row's sums have one order, whatever the number of rows.
    """
    if x.is_cuda:
        from spillover.kernels.triton import moe as on_cuda

        return on_cuda.mixture(x, scores, first, second, k, renormalize, limit, fixed)
    return mixture_reference(x, scores, first, second, k, renormalize, limit)


def mixture_reference(
    x: Tensor, scores: Tensor, first: Experts, second: Experts, k: int, renormalize: bool, limit: float | None = None
) -> Tensor:
    best, ids = scores.float().topk(k)
    shares = best.softmax(-1) if renormalize else scores.float().softmax(-1).gather(-1, ids)

    def expert(index: int, rows: Tensor) -> Tensor:
        bias = [None if stack.bias is None else stack.bias[index] for stack in (first, second)]
        gate_up = linear_reference(rows, first.expert(index, x.dtype, parts=1 if limit is not None else 2), bias[0])
        h = silu_and_mul_reference(gate_up) if limit is None else clamped_swiglu_reference(gate_up, limit)
        return linear_reference(h, second.expert(index, x.dtype), bias[1])

    return moe(x, ids, shares, expert)


def moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """x [T, H], topk_ids and topk_weights [T, k] -> sum over k of weight * expert(id, row) [T, H].

    A row's experts are added in ascending id, so its sum does not depend on the rows beside it.
    """
    out = torch.zeros_like(x)
    if x.shape[0] == 0:
        return out
    ids, order = topk_ids.flatten().sort(stable=True)
    rows = order // topk_ids.shape[1]
    weights = topk_weights.flatten()[order, None].to(x.dtype)
    start = 0
    for expert_id, count in enumerate(torch.bincount(ids).tolist()):
        if count == 0:
            continue
        group = rows[start : start + count]
        out.index_add_(0, group, expert(expert_id, x[group]) * weights[start : start + count])
        start += count
    return out
