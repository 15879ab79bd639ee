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
STEP = 64
TYPES = {torch.bfloat16: ("bf16", 9), torch.float16: ("f16", 6)}  # in PTX, and as CUtensorMapDataType
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_MAP_BYTES, _MAP_ALIGNED = 128, 64  # of a CUtensorMap


class Cut(NamedTuple):
    """How a product is cut, in the words of ordered_gemm.cu."""

    channels: int
    stages: int
    row_blocks: int = 1
    channel_blocks: int = 1
    halves: int = 1
    spread: bool = False
    resident: int = 1
    band: int = 8

    @property
    def rows(self) -> int:
        return 128 * self.halves

    def cluster(self, chunks: int) -> int:
        return chunks if self.spread else self.row_blocks * self.channel_blocks

    def groups(self, rows: int, channels: int) -> tuple[int, int]:
        """Return how many clusters the rows and the channels of a product take."""
        row_blocks, channel_blocks = (1, 1) if self.spread else (self.row_blocks, self.channel_blocks)
        return -(-rows // (self.rows * row_blocks)), -(-channels // (self.channels * channel_blocks))

    @property
    def shared(self) -> int:
        """Bytes of shared memory, with barriers and what it takes to begin at a multiple of 1024."""
        return self.stages * ((self.rows + self.channels) * STEP * 2 + 16) + 1024

    def options(self, chunks: int, dtype: torch.dtype, bias: bool) -> tuple[str, ...]:
        sums = self.channels // 2
        defined = {
            "CHANNELS": self.channels, "HALVES": self.halves, "STAGES": self.stages, "CHUNKS": chunks,
            "SPREAD": int(self.spread), "ROW_BLOCKS": self.row_blocks, "CHANNEL_BLOCKS": self.channel_blocks,
            "BAND": self.band, "RESIDENT": self.resident, "TYPE": TYPES[dtype][0], "HAS_BIAS": int(bias), "SUMS": sums,
            "SUMS_1": sums + 1, "SUMS_2": sums + 2, "PIECES": sums // 16,
        }
        return tuple(f"-D{name}={value}" for name, value in defined.items())


class _Arguments(ctypes.Structure):
    """What the kernel takes, as large as its alignment makes it."""

    _fields_ = (("x", c_char * _MAP_BYTES), ("w", c_char * _MAP_BYTES), ("bias", c_void_p), ("out", c_void_p),
                *((name, c_int) for name in ("rows", "channels", "inner", "chunk", "row_groups", "channel_groups")),
                ("padding", c_int * 6))


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, cut: Cut, early: bool) -> bool:
    """Multiply x [T, K], w [N, K], bias [N] into out [T, N]; False where this kernel cannot. x and w must be readable
    by the tensor memory accelerator."""
    (rows, channels), inner = out.shape, x.shape[1]
    if x.dtype not in TYPES or channels % 8:
        return False
    chunks, chunk = product_chunks(channels, inner)
    if chunks == 1 and cut.spread:
        return False
    module = kernels(cut, chunks, x.dtype, bias is not None, x.device)
    if module is None:
        return False
    row_groups, channel_groups = cut.groups(rows, channels)
    cluster, units = cut.cluster(chunks), row_groups * channel_groups
    clusters = units if cut.spread else min(units, resident_clusters(cut, cluster, x.device))
    row_blocks, channel_blocks = (1, 1) if cut.spread else (cut.row_blocks, cut.channel_blocks)
    arguments = _Arguments()
    arguments.bias, arguments.out = None if bias is None else bias.data_ptr(), out.data_ptr()
    arguments.rows, arguments.channels, arguments.inner, arguments.chunk = rows, channels, inner, chunk
    arguments.row_groups, arguments.channel_groups = row_groups, channel_groups
    for name, each, box in (("x", x, cut.rows // channel_blocks), ("w", w, cut.channels // row_blocks)):
        described = _map(each.data_ptr(), *each.shape, each.stride(0) * 2, box, TYPES[each.dtype][1])
        ctypes.memmove(ctypes.addressof(arguments) + getattr(_Arguments, name).offset, described, _MAP_BYTES)
    module.launch("ordered_gemm", clusters * cluster, 384 if cut.resident == 1 else 288, arguments, cut.shared, early)
    return True


@cache
def kernels(cut: Cut, chunks: int, dtype: torch.dtype, bias: bool, device: torch.device) -> Module | None:
    """Return the kernel that cuts products so, None where there is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY or torch.version.hip:
        return None
    try:
        return Module(SOURCE, cut.options(chunks, dtype, bias), device)
    except CudaError as problem:
        log.warning("products in Triton, without the faster ones in CUDA C++: %s", problem)
        return None


@cache
def resident_clusters(cut: Cut, cluster: int, device: torch.device) -> int:
    """Return how many clusters a device runs at a time. Those of 4 do not take all multiprocessors: a cluster lies in
    one of the groups that the multiprocessors form."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return (processors // cluster - (cluster > 2)) * cut.resident


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=4096)
def _map(address: int, rows: int, inner: int, stride: int, box: int, kind: int) -> bytes:
    """Describe a matrix to the tensor memory accelerator, which copies `box` rows of STEP columns at a time."""
    buffer = (c_char * (_MAP_BYTES + _MAP_ALIGNED))()
    begin = -ctypes.addressof(buffer) % _MAP_ALIGNED
    code = _driver().cuTensorMapEncodeTiled(
        byref(buffer, begin), c_int(kind), c_uint32(2), c_void_p(address), (c_uint64 * 2)(inner, rows),
        (c_uint64 * 1)(stride), (c_uint32 * 2)(STEP, box), (c_uint32 * 2)(1, 1), c_int(0), c_int(_SWIZZLE_128),
        c_int(_PROMOTE_256), c_int(0))
    if code:
        raise CudaError(f"a matrix of {rows} x {inner} cannot be described: {code}")
    return buffer.raw[begin:begin + _MAP_BYTES]
