"""The products of a mixture whose experts are kept as MXFP4 or FP8 codes or as integers, in CUDA C++ (mixture.cu).

Their order of sums is the same for every number of tokens, and differs from that of kernels/triton/moe: a mixture uses
them for all of its products, or for none. Triton kernels do the routing, the sorting and the sum over tiles' rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from spillover.kernels.cuda.driver.compiled import Module, module_or_none
from spillover.kernels.extents import CODE_BLOCK, EXPERT_ROW
from spillover.kernels.formats.fp8_block import Fp8Block
from spillover.kernels.formats.gguf_experts import KINDS, GgufExperts
from spillover.kernels.formats.grouped_gemm import CUDA, GroupedGemm, Tile, Tiles
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.int_experts import GROUPS, IntExperts
from spillover.kernels.formats.mxfp4 import Mxfp4
from spillover.kernels.moe.experts import Experts
from spillover.kernels.triton.launch import pdl_options

SOURCE = Path(__file__).parent / "mixture.cu"
ALIGNED = 32  # hidden and inner sizes must be multiples of this
MOST_EXPERTS = 64  # maximum number of experts of a token
CAPABILITY = (8, 0)  # the lowest with asynchronous copies and products of bfloat16
# By the tokens of a tile: maximum pairs of an expert times GroupedGemm.fill for which it is the fastest on an H200.
UP_TO = {16: 16, 64: 144, 128: 192}
FEW: Tiles = (Tile(1, 16, EXPERT_ROW, 4, 1, "experts_gate_up_pairs"),
              Tile(1, 16, EXPERT_ROW, 16, 1, "experts_down_pairs"))


@dataclass(frozen=True)
class KernelConfig:
    """The constants of a format in mixture.cu."""

    name: str  # FORMAT in mixture.cu
    chunk: int  # steps of EXPERT_ROW inputs in a chunk
    warp_bytes: int  # bytes of a warp's codes in a step
    each: tuple[int, int]  # chunks in flight to a warp, for each of the two products
    stages: Mapping[int, int]  # steps in flight to a block, by tokens of a tile
    sums: int = 1  # number of sums of a chunk, each with its own factor

    def few_shared(self, inner: int, k: int) -> tuple[int, int]:
        """Return the bytes of shared memory of a block of each of the two products of a few tokens."""
        item = self.chunk * (self.warp_bytes + 2 * EXPERT_ROW)
        chunks = -(-inner // (self.chunk * EXPERT_ROW))
        up, down = (tile.warps * each for tile, each in zip(FEW, self.each, strict=True))
        return up * item, down * item + k * (chunks * self.sums * 8 * 16 + 8 * 8)

    def many_shared(self, tile: Tile) -> int:
        return self.stages[tile.tokens] * (tile.tokens * 2 * EXPERT_ROW + tile.warps * self.warp_bytes)

    @cached_property
    def many(self) -> dict[int, Tiles]:
        return {tokens: (Tile(tokens, 128, EXPERT_ROW, 8, stages, f"experts_gate_up_{tokens}"),
                         Tile(tokens, 128, EXPERT_ROW, 8, stages, f"experts_down_{tokens}"))
                for tokens, stages in self.stages.items()}


def _int_config(name: str, bits: int, sums: int) -> KernelConfig:
    stages = {16: 5, 64: 4, 128: 4} if bits == 4 else {16: 3, 64: 3, 128: 4}
    warp_bytes = 256 * bits + max(64 * sums, 16 * bits)
    return KernelConfig(name, 1, warp_bytes, (4, 3 if bits == 4 else 2), stages, sums)


KERNEL_CONFIGS = {Mxfp4.experts.code: KernelConfig("Mxfp4", 3, 1024 + 64, (2, 1), {16: 5, 64: 4, 128: 4}),
                  Fp8Block.experts.code: KernelConfig("Fp8", 1, 2048, (4, 2), {16: 3, 64: 3, 128: 4}),
                  **{IntExperts(GroupedInt(bits, group)).experts.code:
                         _int_config(f"Int{bits}_{group}", bits, EXPERT_ROW // group)
                     for bits in (4, 8) for group in GROUPS},
                  **{GgufExperts(*kind).experts.code: _int_config(
                         f"Gguf{kind[0]}{'_halves' * kind[1]}{'_offset' * kind[2]}", kind[0],
                         EXPERT_ROW // CODE_BLOCK * GgufExperts(*kind).numbers) for kind in KINDS}}


class Product(ctypes.Structure):
    """The argument of the kernels of mixture.cu."""

    _fields_ = (*((name, c_void_p) for name in ("x", "codes", "scales", "bias")),
                *((name, c_int64) for name in ("stride", "scale_stride", "bias_stride")),
                *((name, c_void_p) for name in ("slots", "ids", "shares", "places", "order", "out")),
                ("limit", c_float), *((name, c_int) for name in ("clamped", "sum", "scale_row", "rows", "depth", "k")))


def cuda_gemm(gemm: GroupedGemm, x: Tensor, inner: int, k: int) -> GroupedGemm:
    """Return how the kernels of this module multiply x [T, H] by stacks of an ordered format; `gemm` if they do not.

    The choice does not depend on the number of tokens.
    """
    config = KERNEL_CONFIGS.get(gemm.code)
    if not gemm.ordered or config is None or x.dtype is not torch.bfloat16:
        return gemm
    if x.shape[1] % ALIGNED or inner % ALIGNED or k > MOST_EXPERTS:
        return gemm
    found = kernels(config.name, x.device)
    if found is None or max(config.few_shared(inner, k)) > found.shared:
        return gemm
    many = {UP_TO[tokens]: tiles for tokens, tiles in config.many.items()
            if config.many_shared(tiles[0]) <= found.shared}
    return replace(gemm, code=gemm.code + CUDA, few=FEW, many=many, input_dtypes={torch.bfloat16: torch.float16})


@cache
def kernels(name: str, device: torch.device) -> Module | None:
    """Return the kernels for a format, or None if there are none, which is logged for a CUDA device."""
    if device.type != "cuda":
        return None
    unsupported = ""
    if (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        unsupported = "compute capability {}.{}, and others need {}.{}".format(*capability, *CAPABILITY)
    return module_or_none(SOURCE, (f"-DFORMAT={name}",), device, "mixtures go through Triton's kernels", unsupported)


def pair_products(
    x: Tensor, ids: Tensor, shares: Tensor, first: Experts, second: Experts, limit: float | None,
    tiles: Tiles, h: Tensor, parts: Tensor, out: Tensor | None, slots: Tensor | None = None,
) -> None:
    """Multiply as kernels.triton.moe.moe.pair_products does, but do not use `parts` if there is an `out`."""
    pairs, k = ids.numel(), ids.shape[1]
    begins_early = pdl_options(x.device)["EARLY"]
    shared = KERNEL_CONFIGS[second.gemm.code].few_shared(second.width, k)
    product = _product(x, first, h, k, limit, slots)
    product.ids = ids.data_ptr()
    _launch(first, x.device, tiles[0], pairs, product, shared[0], begins_early)
    product = _product(h, second, parts if out is None else out, k, None, slots)
    product.ids, product.shares, product.sum = ids.data_ptr(), shares.data_ptr(), out is not None
    _launch(second, x.device, tiles[1], ids.shape[0], product, shared[1], begins_early)


def tile_products(
    x: Tensor, order: Tensor, places: Tensor, k: int, first: Experts, second: Experts, limit: float | None,
    tiles: Tiles, h: Tensor, rows: Tensor, slots: Tensor | None = None,
) -> None:
    """Multiply as kernels.triton.moe.moe.tile_products does."""
    for tile, stack, given, out in ((tiles[0], first, x, h), (tiles[1], second, h, rows)):
        product = _product(given, stack, out, k, limit if stack is first else None, slots)
        product.places, product.order = places.data_ptr(), order.data_ptr()
        # The second product reads its weights before the first has completed.
        _launch(stack, x.device, tile, len(places), product, KERNEL_CONFIGS[stack.gemm.code].many_shared(tile),
                stack is second and pdl_options(x.device)["EARLY"])


def _product(x: Tensor, stack: Experts, out: Tensor, k: int, limit: float | None, slots: Tensor | None) -> Product:
    values, scales, bias = stack.values, stack.scales, stack.bias
    assert scales is not None
    assert values.data_ptr() % 16 == 0 == values.stride(0) % 16, "codes are read in units of 16 bytes"
    assert scales.data_ptr() % 4 == 0 == scales.stride(0) % (4 // scales.element_size()), "and scales in words"
    return Product(
        x=x.data_ptr(), codes=values.data_ptr(), scales=scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        stride=values.stride(0), scale_stride=scales.stride(0), bias_stride=0 if bias is None else bias.stride(0),
        slots=None if slots is None else slots.data_ptr(), out=out.data_ptr(), limit=limit or 0.0,
        clamped=limit is not None, scale_row=scales.shape[2], rows=values.shape[1], depth=stack.width, k=k,
    )


def _launch(stack: Experts, device: torch.device, tile: Tile, places: int, product: Product, shared: int,
            early: bool) -> None:
    """Launch one block per `tile.rows` rows of the weights, for each of the `places`."""
    found = kernels(KERNEL_CONFIGS[stack.gemm.code].name, device)
    assert found is not None, "cuda_gemm has compiled them"
    found.launch(tile.kernel, places * -(-product.rows // tile.rows), tile.warps * 32, product, shared, early)
