"""The mixture of experts on a CUDA device that does not hold all of them: a step with paging, and one in passes.

The products and the order of every sum are those of `moe.mixture`; only the slot of an expert is looked up.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from spillover.kernels.cuda.mixture import cuda_gemm
from spillover.kernels.formats.grouped_gemm import GroupedGemm, Tiles
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.moe import LocalExperts
from spillover.kernels.moe.page_table import NONE, PATIENCE, PageTable, Resolution
from spillover.kernels.triton.moe.moe import (
    FEW_TOKENS,
    allocate_pairs,
    allocate_tiles,
    pair_products,
    tile_products,
    wide,
)
from spillover.kernels.triton.moe.moe_routing import combine, count_by_rank, route, sort_by_expert
from spillover.kernels.triton.moe.moe_widen import allocate_wide, widen
from spillover.kernels.triton.moe.paging import assign, collect, gather, gather_and_post, post, resolve


def paged_mixture(
    x: Tensor, scores: Tensor, table: PageTable, layer: int, records: Tensor, slots: Tensor, first: Experts,
    second: Experts, k: int, renormalize: bool, limit: float | None = None,
    split: Tensor | None = None, queue: HostExpertQueue | None = None, replay: Tensor | None = None,
    replay_at: Tensor | None = None, few_tokens: int = FEW_TOKENS, tiles: Tiles | None = None,
    patience: int = PATIENCE,
) -> Tensor:
    """Compute what kernels.moe.paged_moe.paged_mixture does, on the device."""
    if scores.shape[0] == 0:
        return torch.empty_like(x)
    replayed = None if replay is None else (replay[:, layer], table.step if replay_at is None else replay_at)
    passes = MultiPassMixture(x, scores, k, renormalize, first.gemm, second.width, limit, few_tokens, tiles, replayed)
    resolution = resolve(passes.ids, table, layer, None if queue is None else split)
    if queue is None:
        gather(resolution, records, slots)
    else:
        gather_and_post(x, resolution, layer, records, slots, queue)
    assert resolution.row is not None
    if queue is None and not resolution.later:
        return passes.single_pass(first, second, resolution.row)
    passes.add(first, second, resolution.row)
    for later in resolution.later:
        gather(later, records, slots)
        assert later.row is not None
        passes.add(first, second, later.row)
    return passes.end(None if queue is None else (resolution, queue), patience)


def local_mixture(
    x: Tensor, scores: Tensor, first: Experts, second: Experts, k: int, renormalize: bool, limit: float | None,
    local: LocalExperts, few_tokens: int = FEW_TOKENS, tiles: Tiles | None = None,
) -> Tensor:
    """Return the contribution of this rank's experts, which are in the stacks, to kernels.moe.moe.mixture."""
    if scores.shape[0] == 0:
        return torch.empty_like(x)
    passes = MultiPassMixture(x, scores, k, renormalize, first.gemm, second.width, limit, few_tokens, tiles,
                              complete=False)
    if local.rows is not None:
        count_by_rank(passes.ids, len(local), local.rows)
    passes.add(first, second, _local_slots(local.start, local.stop, scores.shape[1], x.device))
    return passes.end()


@cache
def _local_slots(start: int, stop: int, experts: int, device: torch.device) -> Tensor:
    """Return the index of each expert in stacks of the experts from `start` to `stop`, int32 [experts]."""
    slots = torch.full((experts,), NONE, dtype=torch.int32)
    slots[start:stop] = torch.arange(stop - start, dtype=torch.int32)
    return slots.to(device)


class MultiPassMixture:
    """The CUDA form of kernels.moe.paged_moe.Passes. Pairs are routed and sorted at the start, and summed at the end.

    The path and the tiles are those of `moe.mixture` for the same number of tokens, so that the result has the same
    bits. Where that path widens the experts, a pass only widens them, after which their slots may be reused at once:
    all products are computed at the end.
    """

    def __init__(
        self, x: Tensor, scores: Tensor, k: int, renormalize: bool, gemm: GroupedGemm, inner: int,
        limit: float | None = None, few_tokens: int = FEW_TOKENS, tiles: Tiles | None = None,
        replay: tuple[Tensor, Tensor] | None = None, complete: bool = True,
    ) -> None:
        """Route and sort. `replay`: the last two arguments of `moe_routing.route`. `complete`: the passes cover every
        chosen expert; otherwise the contribution of the experts in no pass is left out."""
        tokens, experts = scores.shape
        self._limit, self._k, self._dtype = limit, k, x.dtype
        self._empty = torch.empty_like(x) if tokens == 0 else None
        if tokens == 0:
            return
        self._plain_x = x
        self._hosted: tuple[Resolution, HostExpertQueue] | None = None
        self._wide: tuple[Experts, Experts] | None = None
        if tiles is None and complete and wide(x, gemm, experts, k, inner):
            self._wide = allocate_wide(experts, x.shape[1], inner, x)
            gemm = self._wide[0].gemm
        if tiles is None:
            gemm = cuda_gemm(gemm, x, inner, k)
        width = gemm.row_width(inner)
        self.ids, self._shares, self._x = route(scores, x, k, renormalize, gemm, *(replay or ()))
        few = gemm.few if tokens <= few_tokens else None
        self._few = few is not None
        self._shared = self._few and not gemm.ordered  # whether rows are already multiplied by their shares
        if few is not None:
            self._tiles = tiles or few
            self._h, self._rows = allocate_pairs(self._x, self.ids, width, x.dtype if gemm.ordered else torch.float32)
        else:
            self._tiles = tiles or gemm.many_tiles(tokens * k / experts)
            self._order, self._places = sort_by_expert(self.ids, experts, self._tiles[0].tokens)
            self._h, self._rows = allocate_tiles(self._x, self.ids, width, x.dtype)
        if not complete:
            self._rows.zero_()

    def delegate(self, hosted: Tensor, layer: int, queue: HostExpertQueue) -> None:
        if self._empty is None:
            assert self._wide is None, "a step that widens its experts leaves none to the host"
            resolution = assign(self.ids, hosted)
            post(self._plain_x, resolution, layer, queue)
            self._hosted = (resolution, queue)

    def add(self, first: Experts, second: Experts, slots_row: Tensor) -> None:
        if self._empty is not None:
            return
        if self._wide is not None:
            widen(first, second, self._wide, slots_row)
        elif self._few:
            pair_products(self._x, self.ids, self._shares, first, second, self._limit, self._tiles, self._h,
                          self._rows, None, slots_row)
        else:
            self._tile_products(first, second, slots_row)

    def single_pass(self, first: Experts, second: Experts, slots_row: Tensor) -> Tensor:
        """Return the mixture from this single pass: every chosen expert has a slot."""
        if not self._few:
            self.add(first, second, slots_row)
            return self.end()
        out = torch.empty_like(self._plain_x)
        pair_products(self._x, self.ids, self._shares, first, second, self._limit, self._tiles, self._h, self._rows,
                      out, slots_row)
        return out

    def end(self, hosted: tuple[Resolution, HostExpertQueue] | None = None, patience: int = PATIENCE) -> Tensor:
        """Sum the passes, as Passes.end does. `hosted`: the pairs posted for the host, if not posted by `delegate`."""
        if self._empty is not None:
            return self._empty
        if self._wide is not None:
            self._tile_products(*self._wide, None)
        resolution, queue = hosted or self._hosted or (None, None)
        if self._few or queue is not None:
            return collect(self._rows, self._shares, resolution, queue, self._dtype, self._shared, patience)
        return combine(self._rows, self._shares, self._dtype)

    def _tile_products(self, first: Experts, second: Experts, slots_row: Tensor | None) -> None:
        tile_products(self._x, self._order, self._places, self._k, first, second, self._limit, self._tiles, self._h,
                      self._rows, slots_row)
