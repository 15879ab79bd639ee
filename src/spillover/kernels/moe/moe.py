"""A mixture of experts, from the router's scores to the sum; the CPU groups rows and calls each expert once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.activation import (
    clamped_swiglu,
    clamped_swiglu_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from spillover.kernels.extents import EXPERT_SCRATCH_BYTES
from spillover.kernels.linear import linear, linear_reference
from spillover.kernels.moe.experts import Experts

OTHER_RANK = -1  # id of an expert that another rank computes


@dataclass(frozen=True)
class LocalExperts:
    """The range of experts of one of several ranks, which all have the same number of experts."""

    start: int
    stop: int
    rows: Tensor | None = None  # int64 [ranks]: counters of the pairs that go to each rank's experts; None: not counted

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Routing:
    """How a model's mixtures choose experts, and their activation: see `mixture`."""

    k: int
    renormalize: bool
    limit: float | None


class LayerExperts(Protocol):
    """The experts of one layer, in any kind of memory."""

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        """Return the mixture [T, H] of x [T, H] by the router's scores [T, E], as `mixture` of this module does."""
        ...


@dataclass(frozen=True)
class ResidentExperts:
    """The experts of a layer, all of them on the device."""

    first: Experts
    second: Experts

    def mixture(self, x: Tensor, scores: Tensor, k: int, renormalize: bool, limit: float | None,
                local: LocalExperts | None = None) -> Tensor:
        return mixture(x, scores, self.first, self.second, k, renormalize, limit, local)


def mixture(
    x: Tensor, scores: Tensor, first: Experts, second: Experts, k: int, renormalize: bool, limit: float | None = None,
    local: LocalExperts | None = None,
) -> Tensor:
    """Compute the mixture, x [T, H], scores [T, E] -> [T, H], of the k experts with each token's highest scores.

    `first` [E, 2I, H] and `second` [E, H, I] are the experts' two products. With a `limit` the activation is the
    clamped SwiGLU with gate and up rows interleaved, without it SiLU-mul with all gate rows before the up rows.
    `local`: the experts that the stacks hold, whose share of the sum is returned; None: all.
    """
    if x.is_cuda:
        if local is None:
            from spillover.kernels.triton.moe.moe import mixture as on_cuda

            return on_cuda(x, scores, first, second, k, renormalize, limit)
        from spillover.kernels.triton.moe.paged_moe import local_mixture

        return local_mixture(x, scores, first, second, k, renormalize, limit, local)
    return expert_mlps(x, *route(scores, k, renormalize, limit, local), first, second, limit)


def expert_mlps(x: Tensor, ids: Tensor, shares: Tensor, first: Experts, second: Experts,
                limit: float | None) -> Tensor:
    """Compute a mixture of these stacks on the CPU, as `moe` does: in one native call if their formats and the number
    of rows allow it, which gives the same bits."""
    library, kinds = native.fused(), (first.weight.format.panel_kind, second.weight.format.panel_kind)
    hidden, inner = x.shape[1], second.width
    floats = ids.numel() * (2 * hidden + 3 * inner)
    if library is None or None in kinds or x.dtype is not torch.float32 or 4 * floats > EXPERT_SCRATCH_BYTES:
        return moe(x, ids, shares, lambda index, rows: expert_mlp(rows, first, second, index, limit))
    x, ids, shares = x.contiguous(), ids.contiguous(), shares.contiguous()
    out, scratch = torch.empty_like(x), torch.empty(floats)
    library.expert_mlps(
        *(x.data_ptr(), ids.data_ptr(), shares.data_ptr(), out.data_ptr()),
        *(first.values.data_ptr(), first.stride, native.pointer(first.bias), first.bias_stride, kinds[0]),
        *(second.values.data_ptr(), second.stride, native.pointer(second.bias), second.bias_stride, kinds[1]),
        *(*ids.shape, hidden, inner, limit or 0.0, scratch.data_ptr()),
    )
    return out


def route(scores: Tensor, k: int, renormalize: bool, limit: float | None,
          local: LocalExperts | None = None) -> tuple[Tensor, Tensor]:
    """Route scores [T, E] -> (ids, shares) [T, k] of the experts of each token, on the CPU. `local`: the experts of
    this rank, with ids from 0 on, while others are OTHER_RANK; None: all.

    Without native kernels, shares are rounded as in the reference implementations of the models: those with a `limit`
    (gpt-oss) take the softmax of the chosen scores, the others choose from the softmax of all.
    """
    library = native.library()
    if library is not None and scores.dtype is torch.float32:
        scores = scores.contiguous()
        ids, shares = torch.empty(len(scores), k, dtype=torch.int64), torch.empty(len(scores), k)
        library.route(scores.data_ptr(), *scores.shape, k, int(renormalize), ids.data_ptr(), shares.data_ptr())
    elif limit is not None and renormalize:
        best, ids = scores.topk(k)
        shares = best.softmax(-1)
    else:
        shares, ids = scores.float().softmax(-1).topk(k)
        if renormalize:
            shares = shares / shares.sum(-1, keepdim=True)
    if local is not None and local.rows is not None:
        local.rows.add_(torch.bincount(ids.flatten() // len(local), minlength=len(local.rows)))
    return local_ids(ids, local), shares


def local_ids(ids: Tensor, local: LocalExperts | None) -> Tensor:
    """Return the ids of experts within this rank's range, and OTHER_RANK for those of other ranks."""
    if local is None:
        return ids
    return torch.where((ids >= local.start) & (ids < local.stop), ids - local.start, OTHER_RANK)


def expert_mlp(x: Tensor, first: Experts, second: Experts, index: int, limit: float | None) -> Tensor:
    """Run one expert of the stacks on the CPU, x [T, H] -> [T, H]."""
    gate_up = linear(x, first.weight.expert(index), None if first.bias is None else first.bias[index])
    h = silu_and_mul(gate_up) if limit is None else clamped_swiglu(gate_up, limit)
    return linear(h, second.weight.expert(index), None if second.bias is None else second.bias[index])


def mixture_reference(
    x: Tensor, scores: Tensor, first: Experts, second: Experts, k: int, renormalize: bool, limit: float | None = None
) -> Tensor:
    best, ids = scores.float().topk(k)
    shares = best.softmax(-1) if renormalize else scores.float().softmax(-1).gather(-1, ids)

    return moe(x, ids, shares, lambda index, rows: expert_mlp_reference(rows, first, second, index, limit))


def expert_mlp_reference(x: Tensor, first: Experts, second: Experts, index: int, limit: float | None) -> Tensor:
    bias = [None if stack.bias is None else stack.bias[index] for stack in (first, second)]
    gate_up = linear_reference(x, first.expert(index, x.dtype), bias[0])
    h = silu_and_mul_reference(gate_up) if limit is None else clamped_swiglu_reference(gate_up, limit)
    return linear_reference(h, second.expert(index, x.dtype), bias[1])


def moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Compute a mixture, x [T, H], topk_ids and topk_weights [T, k] -> sum over k of weight * expert(id, row) [T, H].

    A row's experts are added in ascending id, so its sum does not depend on other rows. Ids that are OTHER_RANK are
    skipped.
    """
    out = torch.zeros_like(x)
    if x.shape[0] == 0:
        return out
    if x.shape[0] == 1:  # sorting and gathering would take as long as the experts
        chosen = sorted(zip(topk_ids[0].tolist(), topk_weights[0].to(x.dtype).tolist(), strict=True))
        for expert_id, weight in chosen:
            if expert_id != OTHER_RANK:
                out.add_(expert(expert_id, x) * weight)
        return out
    ids, order = topk_ids.flatten().sort(stable=True)
    rows = order // topk_ids.shape[1]
    weights = topk_weights.flatten()[order, None].to(x.dtype)
    start = int((ids == OTHER_RANK).sum())  # these come first in the order
    for expert_id, count in enumerate(torch.bincount(ids[start:]).tolist()):
        if count == 0:
            continue
        group = rows[start : start + count]
        out.index_add_(0, group, expert(expert_id, x[group]) * weights[start : start + count])
        start += count
    return out
