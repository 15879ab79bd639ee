"""A mixture of experts that are not all on the device: missing experts are paged in, or there are several passes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spillover.kernels.formats.grouped_gemm import GroupedGemm
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.moe import expert_mlp_reference
from spillover.kernels.moe.page_table import NONE, PageTable, Resolution
from spillover.kernels.moe.paging import (
    assign_reference,
    collect_reference,
    gather_reference,
    post_reference,
    resolve_reference,
)


def paged_mixture(
    x: Tensor, scores: Tensor, table: PageTable, layer: int, records: Tensor, slots: Tensor, first: Experts,
    second: Experts, k: int, renormalize: bool, limit: float | None = None,
    split: Tensor | None = None, queue: HostExpertQueue | None = None, replay: Tensor | None = None,
    replay_at: Tensor | None = None,
) -> Tensor:
    """Compute kernels.moe.moe.mixture, x [T, H], scores [T, E] -> [T, H], where `first` and `second` are stacks of
    slots.

    `records` uint8 [E, bytes] are the layer's experts in host memory and `slots` uint8 [S, bytes] the arena that the
    stacks are views of. With a `queue` the host computes the experts that `split` (see paging.resolve_reference)
    assigns to it. `replay` int32 [N, L, k]: the experts of token t are those of row replay_at[t] % N (`replay_at` int32
    [T]; None: the step for all tokens), whatever the scores.
    """
    if x.is_cuda:
        from spillover.kernels.triton.moe import paged_moe as on_cuda

        return on_cuda.paged_mixture(
            x, scores, table, layer, records, slots, first, second, k, renormalize, limit, split, queue, replay,
            replay_at,
        )
    return paged_mixture_reference(
        x, scores, table, layer, records, slots, first, second, k, renormalize, limit, split, queue, replay, replay_at
    )


class Passes(Protocol):
    """A mixture in several passes, each over the experts that are on the device at that time."""

    ids: Tensor  # int32 [T, k]: experts that the router chose

    def delegate(self, hosted: Tensor, layer: int, queue: HostExpertQueue) -> None:
        """Make the host compute the experts marked in `hosted` int32 [E], while the passes compute the others."""
        ...

    def add(self, first: Experts, second: Experts, slots_row: Tensor) -> None:
        """Compute the experts that have a slot in `slots_row` int32 [E] (others: -1). Each must be added once."""
        ...

    def end(self) -> Tensor:
        """Return the mixture [T, H], with the bits of kernels.moe.moe.mixture over all experts at once, but for those
        of the host."""
        ...


def begin_passes(
    x: Tensor, scores: Tensor, k: int, renormalize: bool, gemm: GroupedGemm, inner: int, limit: float | None = None
) -> Passes:
    """Begin a mixture in passes. `gemm` and `inner` are Experts.gemm of both stacks and Experts.width of the second."""
    if x.is_cuda:
        from spillover.kernels.triton.moe.paged_moe import MultiPassMixture

        return MultiPassMixture(x, scores, k, renormalize, gemm, inner, limit)
    return MultiPassMixtureReference(x, scores, k, renormalize, gemm, inner, limit)


def route_reference(
    scores: Tensor, k: int, renormalize: bool, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route scores [T, E] -> ids int32 [T, k], shares float32 [T, k]; `replayed` [T, k] or [1, k]: ids to use instead
    of the chosen ones."""
    scores = scores.float()
    ids = scores.topk(k).indices if replayed is None else replayed.long().expand(scores.shape[0], k)
    shares = scores.gather(-1, ids).softmax(-1) if renormalize else scores.softmax(-1).gather(-1, ids)
    return ids.int(), shares


def paged_mixture_reference(
    x: Tensor, scores: Tensor, table: PageTable, layer: int, records: Tensor, slots: Tensor, first: Experts,
    second: Experts, k: int, renormalize: bool, limit: float | None = None,
    split: Tensor | None = None, queue: HostExpertQueue | None = None, replay: Tensor | None = None,
    replay_at: Tensor | None = None,
) -> Tensor:
    at = table.step if replay_at is None else replay_at
    replayed = None if replay is None else replay[at.long() % replay.shape[0], layer]
    ids, shares = route_reference(scores, k, renormalize, replayed)
    resolution = resolve_reference(ids, table, layer, None if queue is None else split)
    if queue is not None:
        post_reference(x, resolution, layer, queue)
    gather_reference(resolution, records, slots)
    rows = torch.zeros(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    assert resolution.row is not None
    experts_reference(x, ids, resolution.row, first, second, limit, rows)
    for later in resolution.later:
        gather_reference(later, records, slots)
        assert later.row is not None
        experts_reference(x, ids, later.row, first, second, limit, rows)
    return collect_reference(rows, shares, resolution, queue, x.dtype)


class MultiPassMixtureReference:
    def __init__(
        self, x: Tensor, scores: Tensor, k: int, renormalize: bool, gemm: GroupedGemm, inner: int,
        limit: float | None = None,
    ) -> None:
        self.x, self.limit = x, limit
        self.ids, self.shares = route_reference(scores, k, renormalize)
        self.rows = torch.zeros(self.ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
        self.hosted: tuple[Resolution, HostExpertQueue] | None = None

    def delegate(self, hosted: Tensor, layer: int, queue: HostExpertQueue) -> None:
        resolution = assign_reference(self.ids, hosted)
        post_reference(self.x, resolution, layer, queue)
        self.hosted = (resolution, queue)

    def add(self, first: Experts, second: Experts, slots_row: Tensor) -> None:
        experts_reference(self.x, self.ids, slots_row, first, second, self.limit, self.rows)

    def end(self) -> Tensor:
        resolution, queue = self.hosted or (None, None)
        return collect_reference(self.rows, self.shares, resolution, queue, self.x.dtype)


def experts_reference(
    x: Tensor, ids: Tensor, slots_row: Tensor, first: Experts, second: Experts, limit: float | None, rows: Tensor
) -> None:
    """Set rows[pair] to its expert's output for its token, for experts that have a slot in `slots_row` [E]."""
    flat, k = ids.flatten(), ids.shape[1]
    for expert in sorted(set(flat.tolist())):
        slot = int(slots_row[expert])
        if slot == NONE:
            continue
        pairs = (flat == expert).nonzero().flatten()
        rows[pairs] = expert_mlp_reference(x[pairs // k], first, second, slot, limit)
