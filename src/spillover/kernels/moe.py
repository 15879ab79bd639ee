"""A mixture of experts: rows grouped by expert, each expert called once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
