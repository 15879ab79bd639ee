"""Products of many rows whose sums have one order, in CUDA C++ for compute capability 9.0 (ordered_gemm.cu).

They give the same bits as triton/ordered_linear.py, which is used where they do not apply, with any cut of a product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.cuda.driver.compiled import Module, compile_ahead, module_or_none
from spillover.kernels.cuda.driver.tensor_map import TYPES, Map, capable, processors, sums_options, tensor_map
from spillover.kernels.extents import product_chunks

SOURCE = Path(__file__).parent / "ordered_gemm.cu"
STEP = 64  # inputs of a step
UNIT_ROWS = 64  # rows that a warpgroup multiplies at once
SHARED = 227 << 10  # bytes of a multiprocessor's shared memory
NAMES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}  # names of the types in instructions.cuh


class Cut(NamedTuple):
    """The tiles of a product, in the terms of ordered_gemm.cu."""

    channels: int  # channels of a tile
    halves: int = 1  # units of UNIT_ROWS rows per warpgroup
    groups: int = 2  # warpgroups that multiply
    spread: bool = False  # whether the chunks of a tile are spread over a cluster of blocks
    gated: bool = False  # whether half of a tile's channels are of each of two matrices

    @property
    def rows(self) -> int:
        return UNIT_ROWS * self.halves * self.groups

    @property
    def stored(self) -> int:
        """Return the number of channels of a tile that are stored."""
        return self.channels // 2 if self.gated else self.channels

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def stages(self) -> int:
        return (SHARED - 2048) // ((self.rows + self.channels) * STEP * 2 + 16)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block, including barriers."""
        return self.stages * ((self.rows + self.channels) * STEP * 2 + 16)

    def tiles(self, rows: int, channels: int) -> int:
        return -(-rows // self.rows) * -(-channels // self.channels)

    def slots(self, processors: int) -> int:
        """Return the number of tiles that run at a time: 30 clusters of 4 fit an H200 of 132 multiprocessors."""
        return max(1, processors * 10 // 44) if self.spread else processors

    def clocks(self, inner: int, chunks: int) -> float:
        """Estimate the clock cycles of a tile. A step of 16 inputs is bound by the tensor cores or by shared memory, to
        which operands are written once and from which they are read once per 64 rows; large tiles copy less, and each
        ends with a store. With wide sums, the totals of chunks leave few registers. The cut that this chooses is on
        average 1% slower than the fastest one timed on an H200."""
        multiply = self.halves * self.channels
        share = 2 * self.halves * (16 + self.channels / 4) + (self.rows + self.channels) / 4
        crowded = {192: 1.03, 224: 1.06}.get(self.channels, 1.0) if chunks > 1 else 1.0
        return crowded * inner / 16 * (max(multiply, share) + (self.rows + self.channels) / 16) + 10 * multiply

    def clocks_of_few(self, rows: int, channels: int, inner: int, chunks: int, processors: int) -> float:
        """Estimate the clock cycles of a product of up to FEW_ROWS rows. A step of 16 inputs is bound by the tensor
        cores, by shared memory or by the cache, from which x is read again for each tile. The cut that this chooses is
        on average 1% slower than the fastest one timed on an H200."""
        box, multiply = min(rows, self.rows), self.groups * self.halves * self.channels / 2
        share = self.groups * self.halves * (16 + self.channels / 4) + (box + self.channels) / 4
        step = max(multiply, share, 0.46 * box + 0.82 * self.channels)
        tile = inner / (chunks if self.spread else 1) / 16 * step + 94 * multiply + 2800
        if self.spread:
            tile += 800 + 2.1 * self.groups * self.channels
        return -(-self.tiles(rows, channels) // self.slots(processors)) * tile

    def options(self, chunks: int, dtype: torch.dtype, bias: bool) -> tuple[str, ...]:
        defined = {
            "CHANNELS": self.channels, "HALVES": self.halves, "GROUPS": self.groups, "STAGES": self.stages,
            "CHUNKS": chunks, "CLUSTER": chunks if self.spread else 1, "TYPE": NAMES[dtype], "HAS_BIAS": int(bias),
            "GATED": int(self.gated), **sums_options(self.channels),
        }
        return tuple(f"-D{name}={value}" for name, value in defined.items())


CUTS = tuple(Cut(channels) for channels in range(32, 225, 32))
LARGE = (Cut(256), Cut(192, 2))  # only without chunks, as sums and totals would not fit into registers
LONG = 2048  # minimum inner dimension for LARGE: with less, storing a tile's sums takes long compared to its products

FEW_ROWS = 256  # maximum number of rows that few_cuts is for
MOST_CHANNELS = {1: 256, 2: 256, 3: 192}  # by warpgroups: maximum channels of a tile, whose sums fit into registers
MOST_WITH_TOTALS = {1: 128, 2: 224, 3: 96}  # the same with totals of chunks
MOST_WAVES = 12  # maximum number of waves that tiles are narrowed for
MOST_PREPARED = 2048  # rows; products of more rows have the same cuts
LEAST_CHANNELS = 16


def few_cuts(rows: int, channels: int, chunks: int, processors: int, gated: bool = False) -> tuple[Cut, ...]:
    """Return the cuts for up to FEW_ROWS rows, so narrow that tiles fill one wave, two waves, and so on."""
    cuts, unit = [], 16 if gated else 8
    for groups in MOST_CHANNELS:
        row_tiles = -(-rows // (UNIT_ROWS * groups))
        if groups > -(-rows // UNIT_ROWS) or row_tiles > 2:
            continue
        for spread in (False, True)[:1 + (chunks > 1)]:
            most = (MOST_CHANNELS if spread or chunks == 1 else MOST_WITH_TOTALS)[groups]
            for waves in range(1, MOST_WAVES + 1):
                across = Cut(0, groups=groups, spread=spread).slots(processors) * waves // row_tiles
                width = -(-channels // (unit * max(across, 1))) * unit
                cuts.append(Cut(min(max(width, LEAST_CHANNELS), most), 1, groups, spread, gated))
    return tuple(dict.fromkeys(cuts))


class _Arguments(ctypes.Structure):
    """The argument of the kernel, padded to its alignment."""

    _fields_ = (("x", Map), ("w", Map), ("bias", c_void_p), ("out", c_void_p), ("rows", c_int), ("channels", c_int),
                ("inner", c_int), ("chunk", c_int), ("padding", c_int * 8))


class _Plan(NamedTuple):
    cut: Cut
    blocks: int
    chunk: int
    kernel: Module


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, early: bool, gated: bool = False,
             cut: Cut | None = None) -> bool:
    """Multiply x [T, K] by w [N, K] and add bias [N] into out [T, N]; `gated`: silu(first half) * second half into
    out [T, N / 2]. Return False if no kernel supports it. x and w must be readable by the tensor memory accelerator.
    `cut` overrides the automatic choice."""
    (rows, channels), inner = out.shape, x.shape[1]
    plan = _plan(-(-rows // UNIT_ROWS), w.shape[0], inner, x.dtype, bias is not None, x.device, gated, cut)
    if plan is None:
        return False
    kind = TYPES[x.dtype]
    arguments = _Arguments(
        tensor_map(x.data_ptr(), kind, (inner, rows), (x.stride(0) * 2,), (STEP, min(rows, plan.cut.rows))),
        tensor_map(w.data_ptr(), kind, (inner, w.shape[0]), (w.stride(0) * 2,), (STEP, min(channels, plan.cut.stored))),
        None if bias is None else bias.data_ptr(), out.data_ptr(), rows, channels, inner, plan.chunk)
    plan.kernel.launch("ordered_gemm", plan.blocks, plan.cut.threads, arguments, plan.cut.shared, early)
    return True


@cache
def _plan(row_units: int, channels: int, inner: int, dtype: torch.dtype, bias: bool, device: torch.device, gated: bool,
          cut: Cut | None) -> _Plan | None:
    if dtype not in TYPES or channels % (16 if gated else 8):
        return None
    count, (chunks, chunk) = processors(device), product_chunks(channels, inner)
    rows = row_units * UNIT_ROWS
    cut = cut or choose_cut(rows, channels, inner, count, gated)
    found = kernel(cut, chunks, dtype, bias, device)
    tiles = cut.tiles(rows, channels)
    blocks = tiles * chunks if cut.spread else min(tiles, count)
    return None if found is None else _Plan(cut, blocks, chunk, found)


def prepare(matrices: Iterable[tuple[int, int, bool, bool]], dtype: torch.dtype, device: torch.device,
            most_rows: int) -> None:
    """Compile the kernels for products of up to `most_rows` rows with matrices (channels, inner dimension, whether
    there is a bias, whether it is gated), several at a time: at first use each kernel would delay a step by more than a
    second."""
    if dtype not in TYPES or not capable(device):
        return
    units = range(1, min(most_rows, MOST_PREPARED) // UNIT_ROWS + 1)
    wanted = {choose_cut(UNIT_ROWS * unit, channels, inner, processors(device), gated).options(
                  product_chunks(channels, inner)[0], dtype, bias)
              for channels, inner, bias, gated in set(matrices) if channels % (16 if gated else 8) == 0
              for unit in units}
    compile_ahead(SOURCE, wanted, device)


def choose_cut(rows: int, channels: int, inner: int, processors: int, gated: bool = False) -> Cut:
    """Return the cut that minimises the estimated time of the multiprocessor with most tiles."""
    chunks = product_chunks(channels, inner)[0]
    if rows <= FEW_ROWS:
        cuts = few_cuts(rows, channels, chunks, processors, gated)
        return min(cuts, key=lambda cut: cut.clocks_of_few(rows, channels, inner, chunks, processors))
    cuts = (*CUTS, *LARGE) if chunks == 1 and inner >= LONG else CUTS
    best = min(cuts, key=lambda cut: -(-cut.tiles(rows, channels) // processors) * cut.clocks(inner, chunks))
    return best._replace(gated=gated)


@cache
def kernel(cut: Cut, chunks: int, dtype: torch.dtype, bias: bool, device: torch.device) -> Module | None:
    """Return the kernel for a cut, or None if there is none."""
    if not capable(device):
        return None
    return module_or_none(SOURCE, cut.options(chunks, dtype, bias), device, "products go through Triton's kernels")
