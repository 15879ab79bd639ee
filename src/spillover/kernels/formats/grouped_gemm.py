"""How a mixture on a CUDA device multiplies by stacks of a format: parameters of kernels/triton/moe/moe.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spillover.kernels.extents import EXPERT_ROW


@dataclass(frozen=True)
class Tile:
    """The division of a product into tiles."""

    tokens: int  # rows of activations of a tile
    rows: int  # rows of weights of a tile
    depth: int  # inputs of a step
    warps: int  # warps of a program
    stages: int  # steps in flight
    kernel: str = ""  # name of a kernel of kernels/cuda/mixture.cu; empty: one of Triton's


Tiles = tuple[Tile, Tile]  # for the two products of a mixture
CUDA = 16  # added to a format's code if activations have the layout of kernels/cuda/mixture.cu


@dataclass(frozen=True)
class GroupedGemm:
    """The parameters with which kernels/triton/moe/moe.py multiplies by stacks of a format."""

    code: int  # FORMAT of kernels/triton/moe/moe_product.py
    few: Tiles | None  # tiles for a few tokens, not sorted by expert; None: these are sorted too
    many: Mapping[int, Tiles]  # tiles by the maximum of `fill` times the average rows of an expert
    invariant: Mapping[int, Tiles]  # likewise, tiles whose sums have the same bits
    ordered: bool = False  # whether few tokens are summed and rounded in the same way as many
    fill: float = 1.5  # factor for experts that have more rows than the average
    input_dtypes: Mapping[torch.dtype, torch.dtype] | None = None  # types of copied activations, by type; None: no copy
    dequantizes: bool = False  # whether large steps first dequantise all experts: see extents.dequantizes

    def batch_invariant(self) -> GroupedGemm:
        first, second = (replace(tile, tokens=1) for tile in self.invariant[16])
        return replace(self, few=(first, second), many=self.invariant, ordered=True, fill=1.5, dequantizes=False)

    def row_width(self, columns: int) -> int:
        """Return the stride between rows of activations, in elements."""
        return -(-columns // EXPERT_ROW) * EXPERT_ROW if self.code >= CUDA else columns

    def many_tiles(self, pairs_an_expert: float) -> Tiles:
        *sizes, largest = sorted(self.many)
        return self.many[next((size for size in sizes if self.fill * pairs_an_expert <= size), largest)]


def tiles(*sizes: tuple[int, int, int, int, int, int, int]) -> dict[int, Tiles]:
    """Return tiles by tokens, of tokens, depth; rows, warps, stages of the first product; rows, warps of the second."""
    return {tokens: (Tile(tokens, rows, depth, warps, stages), Tile(tokens, more, depth, others, stages))
            for tokens, depth, rows, warps, stages, more, others in sizes}


def invariant_tiles(depth: int) -> dict[int, Tiles]:
    """Return the tiles that are multiplied by wgmma, where the size of a tile does not change a sum."""
    return tiles((16, depth, 32, 4, 4, 64, 4), (32, depth, 32, 4, 4, 64, 4), (64, depth, 64, 4, 3, 128, 4),
                 (128, depth, 64, 8, 3, 128, 8))
