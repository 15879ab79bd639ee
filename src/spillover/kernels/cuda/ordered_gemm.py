"""Products of many rows whose sums have one order, in CUDA C++ for compute capability 9.0 (ordered_gemm.cu).

They have the bits of triton/ordered_linear.py, which serves wherever these do not: how a product is cut is free.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import byref, c_char, c_int, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.cuda.compiled import CudaError, Module
from spillover.kernels.extents import product_chunks

log = logging.getLogger("spillover.kernels")

SOURCE = Path(__file__).parent / "ordered_gemm.cu"
CAPABILITY = (9, 0)
STEP = 64  # of the inner dimension
LEAST_ROWS = 128  # of a tile
SHARED = 225 << 10  # bytes of shared memory for stages
THREADS = 384
TYPES = {torch.bfloat16: ("bf16", 9), torch.float16: ("f16", 6)}  # in PTX, and as CUtensorMapDataType
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_MAP_BYTES, _MAP_ALIGNED = 128, 64  # of a CUtensorMap
Map = c_uint64 * (_MAP_BYTES // 8)


class Cut(NamedTuple):
    """The tiles of a product, in the words of ordered_gemm.cu."""

    channels: int
    halves: int = 1

    @property
    def rows(self) -> int:
        return LEAST_ROWS * self.halves

    @property
    def stages(self) -> int:
        return SHARED // ((self.rows + self.channels) * STEP * 2)

    @property
    def shared(self) -> int:
        """Bytes of shared memory, with barriers and what it takes to begin at a multiple of 1024."""
        return self.stages * ((self.rows + self.channels) * STEP * 2 + 16) + 1024

    def tiles(self, rows: int, channels: int) -> int:
        return -(-rows // self.rows) * -(-channels // self.channels)

    def clocks(self, inner: int, chunks: int) -> float:
        """Estimate what a tile takes. A step of 16 is bound by the tensor cores or by shared memory, which operands are
        written to once and read from once per 64 rows; large tiles copy less, and each ends with a store. Beside wide
        sums the totals of chunks leave few registers. What this chooses is on average 1% slower than the fastest cut
        that was timed on an H200."""
        multiply = self.halves * self.channels
        share = 2 * self.halves * (16 + self.channels / 4) + (self.rows + self.channels) / 4
        crowded = {192: 1.03, 224: 1.06}.get(self.channels, 1.0) if chunks > 1 else 1.0
        return crowded * inner / 16 * (max(multiply, share) + (self.rows + self.channels) / 16) + 10 * multiply

    def options(self, chunks: int, dtype: torch.dtype, bias: bool) -> tuple[str, ...]:
        sums = self.channels // 2
        defined = {
            "CHANNELS": self.channels, "HALVES": self.halves, "STAGES": self.stages, "CHUNKS": chunks,
            "TYPE": TYPES[dtype][0], "HAS_BIAS": int(bias), "SUMS": sums, "SUMS_1": sums + 1, "SUMS_2": sums + 2,
            "PIECES": sums // 16,
        }
        return tuple(f"-D{name}={value}" for name, value in defined.items())


CUTS = tuple(Cut(channels) for channels in range(32, 225, 32))
LARGE = (Cut(256), Cut(192, 2))  # without chunks only, as sums and totals would not fit into registers, and not if
LONG = 2048  # is more than the inner dimension: a tile's sums then take long to store for what it multiplies


class _Arguments(ctypes.Structure):
    """What the kernel takes, as large as its alignment makes it."""

    _fields_ = (("x", Map), ("w", Map), ("bias", c_void_p), ("out", c_void_p), ("rows", c_int), ("channels", c_int),
                ("inner", c_int), ("chunk", c_int), ("padding", c_int * 8))


class _Plan(NamedTuple):
    cut: Cut
    blocks: int
    chunk: int
    kernel: Module


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, early: bool, cut: Cut | None = None) -> bool:
    """Multiply x [T, K], w [N, K], bias [N] into out [T, N]; False where this kernel cannot. x and w must be readable
    by the tensor memory accelerator. `cut`: instead of the one that would be chosen."""
    (rows, channels), inner = out.shape, x.shape[1]
    plan = _plan(-(-rows // LEAST_ROWS), channels, inner, x.dtype, bias is not None, x.device, cut)
    if plan is None:
        return False
    kind = TYPES[x.dtype][1]
    arguments = _Arguments(
        _map(x.data_ptr(), rows, inner, x.stride(0) * 2, plan.cut.rows, kind),
        _map(w.data_ptr(), channels, inner, w.stride(0) * 2, plan.cut.channels, kind),
        None if bias is None else bias.data_ptr(), out.data_ptr(), rows, channels, inner, plan.chunk)
    plan.kernel.launch("ordered_gemm", plan.blocks, THREADS, arguments, plan.cut.shared, early)
    return True


@cache
def _plan(row_tiles: int, channels: int, inner: int, dtype: torch.dtype, bias: bool, device: torch.device,
          cut: Cut | None) -> _Plan | None:
    if dtype not in TYPES or channels % 8:
        return None
    processors, (chunks, chunk) = _processors(device), product_chunks(channels, inner)
    rows = row_tiles * LEAST_ROWS
    cut = cut or chosen(rows, channels, inner, processors)
    found = kernel(cut, chunks, dtype, bias, device)
    return None if found is None else _Plan(cut, min(cut.tiles(rows, channels), processors), chunk, found)


def chosen(rows: int, channels: int, inner: int, processors: int) -> Cut:
    """Return the cut with which the multiprocessor that has most tiles takes least."""
    chunks = product_chunks(channels, inner)[0]
    cuts = (*CUTS, *LARGE) if chunks == 1 and inner >= LONG else CUTS
    return min(cuts, key=lambda cut: -(-cut.tiles(rows, channels) // processors) * cut.clocks(inner, chunks))


@cache
def kernel(cut: Cut, chunks: int, dtype: torch.dtype, bias: bool, device: torch.device) -> Module | None:
    """Return the kernel that cuts products so, None where there is none."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != CAPABILITY:
        return None
    try:
        return Module(SOURCE, cut.options(chunks, dtype, bias), device)
    except CudaError as problem:
        _warn(str(problem).partition("\n")[0])
        return None


@cache
def _warn(problem: str) -> None:
    log.warning("products go through Triton's kernels: %s", problem)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=8192)
def _map(address: int, rows: int, inner: int, stride: int, box: int, kind: int) -> ctypes.Array[c_uint64]:
    """Describe a matrix to the tensor memory accelerator, which copies `box` rows of STEP columns at a time."""
    buffer = (c_char * (_MAP_BYTES + _MAP_ALIGNED))()
    begin = -ctypes.addressof(buffer) % _MAP_ALIGNED
    code = _driver().cuTensorMapEncodeTiled(
        byref(buffer, begin), c_int(kind), c_uint32(2), c_void_p(address), (c_uint64 * 2)(inner, rows),
        (c_uint64 * 1)(stride), (c_uint32 * 2)(STEP, box), (c_uint32 * 2)(1, 1), c_int(0), c_int(_SWIZZLE_128),
        c_int(_PROMOTE_256), c_int(0))
    if code:
        raise CudaError(f"a matrix of {rows} x {inner} cannot be described: {code}")
    return Map.from_buffer_copy(buffer, begin)
