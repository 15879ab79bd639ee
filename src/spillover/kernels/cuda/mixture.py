"""The products of a mixture whose experts are kept as MXFP4 or FP8 codes, in CUDA C++ (mixture.cu).

They have one order of sums at every number of tokens, which is not that of kernels/triton/moe: a mixture takes all its
products from here, or none. Routing, sorting and the sum over tiles' rows are Triton's.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from spillover.kernels.cuda.compiled import SHARED_BYTES, CudaError, Module
from spillover.kernels.formats.fp8_block import Fp8Block
from spillover.kernels.formats.grouped_gemm import CUDA, GroupedGemm, Tile, Tiles
from spillover.kernels.formats.mxfp4 import Mxfp4
from spillover.kernels.moe.experts import Experts
from spillover.kernels.triton.launch import early

log = logging.getLogger("spillover.kernels")

ALLOWED = False  # for the formats with one order of sums; not before it is timed beside Triton's

SOURCE = Path(__file__).parent / "mixture.cu"
FORMATS = {Mxfp4.experts.code: "Mxfp4", Fp8Block.experts.code: "Fp8"}  # FORMAT of mixture.cu
ALIGNED = 32  # hidden and inner sizes are multiples of it
_CHUNKS = {"Mxfp4": 384, "Fp8": 128}  # inputs that are summed from nothing
FEW: Tiles = (Tile(1, 16, 128, 8, 1, "experts_gate_up_pairs"), Tile(1, 16, 128, 16, 1, "experts_down_pairs"))
MANY = {tokens: (Tile(tokens, rows, 128, 8, stages, f"experts_gate_up_{tokens}"),
                 Tile(tokens, rows, 128, 8, stages, f"experts_down_{tokens}"))
        for tokens, rows, stages in ((8, 32, 1), (16, 32, 1), (32, 32, 1), (64, 256, 3))}


class Product(ctypes.Structure):
    """What a kernel of mixture.cu takes."""

    _fields_ = (*((name, c_void_p) for name in ("x", "codes", "scales", "bias")),
                *((name, c_int64) for name in ("stride", "scale_stride", "bias_stride")),
                *((name, c_void_p) for name in ("slots", "ids", "shares", "places", "order", "out")),
                ("limit", c_float), *((name, c_int) for name in ("clamped", "sum", "scale_row", "rows", "depth", "k")))


def cuda_gemm(gemm: GroupedGemm, x: Tensor, inner: int, k: int) -> GroupedGemm:
    """Return how the kernels here multiply x [T, H] with stacks of an ordered format; `gemm` where they do not.

    The number of tokens makes no difference.
    """
    form = FORMATS.get(gemm.code)
    if not ALLOWED or not gemm.ordered or form is None or x.dtype is not torch.bfloat16:
        return gemm
    if x.shape[1] % ALIGNED or inner % ALIGNED or _down_shared(form, inner, k) > SHARED_BYTES or \
            8 * k > 32 * FEW[1].warps or kernels(form, x.device) is None:
        return gemm
    return replace(gemm, code=gemm.code + CUDA, few=FEW, many=MANY)


@cache
def kernels(form: str, device: torch.device) -> Module | None:
    """Return the kernels for a format; None, and a line in the log, where they cannot be compiled."""
    try:
        return Module(SOURCE, (f"-DFORMAT={form}",), device)
    except CudaError as problem:
        log.warning("mixtures go through Triton's kernels: %s", str(problem).partition("\n")[0])
        return None


def pair_products(
    x: Tensor, ids: Tensor, shares: Tensor, first: Experts, second: Experts, limit: float | None,
    tiles: Tiles, h: Tensor, parts: Tensor, out: Tensor | None, slots: Tensor | None = None,
) -> None:
    """As kernels.triton.moe.moe.pair_products, but `parts` is left alone where there is an `out`."""
    pairs, k = ids.numel(), ids.shape[1]
    begins_early = early(x.device)["EARLY"]
    product = _product(x, first, h, k, limit, slots)
    product.ids = ids.data_ptr()
    _launch(first, x.device, tiles[0], pairs, product, early=begins_early)
    product = _product(h, second, parts if out is None else out, k, None, slots)
    product.ids, product.shares, product.sum = ids.data_ptr(), shares.data_ptr(), out is not None
    _launch(second, x.device, tiles[1], ids.shape[0], product, _down_shared(_form(second), second.width, k),
            begins_early)


def tile_products(
    x: Tensor, order: Tensor, places: Tensor, k: int, first: Experts, second: Experts, limit: float | None,
    tiles: Tiles, h: Tensor, rows: Tensor, slots: Tensor | None = None,
) -> None:
    """As kernels.triton.moe.moe.tile_products."""
    for tile, stack, given, out in ((tiles[0], first, x, h), (tiles[1], second, h, rows)):
        product = _product(given, stack, out, k, limit if stack is first else None, slots)
        product.places, product.order = places.data_ptr(), order.data_ptr()
        _launch(stack, x.device, tile, len(places), product)


def _form(stack: Experts) -> str:
    return FORMATS[stack.gemm.code]


def _down_shared(form: str, inner: int, k: int) -> int:
    """Return the bytes that a block of `experts_down_pairs` shares: sums of 8 pairs of rows, by chunk and by expert."""
    return (-(-inner // _CHUNKS[form]) + 1) * k * 8 * 8


def _product(x: Tensor, stack: Experts, out: Tensor, k: int, limit: float | None, slots: Tensor | None) -> Product:
    values, scales, bias = stack.values, stack.scales, stack.bias
    assert scales is not None
    assert values.data_ptr() % 16 == 0 == values.stride(0) % 16, "codes are read in units of 16 bytes"
    return Product(
        x=x.data_ptr(), codes=values.data_ptr(), scales=scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        stride=values.stride(0), scale_stride=scales.stride(0), bias_stride=0 if bias is None else bias.stride(0),
        slots=None if slots is None else slots.data_ptr(), out=out.data_ptr(), limit=limit or 0.0,
        clamped=limit is not None, scale_row=scales.shape[2], rows=values.shape[1], depth=stack.width, k=k,
    )


def _launch(stack: Experts, device: torch.device, tile: Tile, places: int, product: Product, shared: int = 0,
            early: bool = False) -> None:
    """Launch a block per `tile.rows` of the weights, for each of the places."""
    found = kernels(_form(stack), device)
    assert found is not None, "cuda_gemm has compiled them"
    found.launch(tile.kernel, places * -(-product.rows // tile.rows), tile.warps * 32, product, shared, early)
