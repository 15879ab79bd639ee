"""How a mixture on a CUDA device multiplies with stacks of a format: what kernels/triton/moe/moe.py reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spillover.kernels.extents import EXPERT_ROW


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows of activations and of weights, depth of a step; warps and stages that do it."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int
    kernel: str = ""  # of kernels/cuda/mixture.cu; empty: one of Triton's


Tiles = tuple[Tile, Tile]  # for the two products of a mixture
CUDA = 16  # added to a format's code where activations lie as kernels/cuda/mixture.cu takes them


@dataclass(frozen=True)
class GroupedGemm:
    """How kernels/triton/moe/moe.py multiplies with stacks of a format."""

    code: int  # FORMAT of kernels/triton/moe/moe_product.py
    few: Tiles | None  # for a few tokens, unsorted; None: they are sorted too
    many: Mapping[int, Tiles]  # by `fill` times the average rows of an expert, up to which they serve
    invariant: Mapping[int, Tiles]  # likewise, of those whose sums agree to the bit
    ordered: bool = False  # a few tokens are summed and rounded as many are
    fill: float = 1.5  # experts have more rows than the average
    input_dtypes: Mapping[torch.dtype, torch.dtype] | None = None  # of activations that it copies; None: it does not
    dequantizes: bool = False  # once a layer, before a large step: see extents.dequantizes

    def batch_invariant(self) -> GroupedGemm:
        first, second = (replace(tile, tokens=1) for tile in self.invariant[16])
        return replace(self, few=(first, second), many=self.invariant, ordered=True, fill=1.5, dequantizes=False)

    def row_width(self, columns: int) -> int:
        """Return how far rows of activations lie apart."""
        return -(-columns // EXPERT_ROW) * EXPERT_ROW if self.code >= CUDA else columns

    def many_tiles(self, pairs_an_expert: float) -> Tiles:
        *sizes, largest = sorted(self.many)
        return self.many[next((size for size in sizes if self.fill * pairs_an_expert <= size), largest)]


def tiles(*sizes: tuple[int, int, int, int, int, int, int]) -> dict[int, Tiles]:
    """Return by tokens of a tile: tokens, depth; rows, warps, stages of the first; rows, warps of the second."""
    return {tokens: (Tile(tokens, rows, depth, warps, stages), Tile(tokens, more, depth, others, stages))
            for tokens, depth, rows, warps, stages, more, others in sizes}


def invariant_tiles(depth: int) -> dict[int, Tiles]:
    """Return the tiles that go through wgmma, where the size of a tile makes no difference to a sum."""
    return tiles((16, depth, 32, 4, 4, 64, 4), (32, depth, 32, 4, 4, 64, 4), (64, depth, 64, 4, 3, 128, 4),
                 (128, depth, 64, 8, 3, 128, 8))
