"""Common parts of products in CUDA C++: tensor maps for the tensor memory accelerator, options, device queries."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache

import torch

from spillover.kernels.cuda.driver.compiled import CudaError

CAPABILITY = (9, 0)  # compute capability that the kernels are for
BYTES = 0  # CU_TENSOR_MAP_DATA_TYPE_UINT8
TYPES = {torch.bfloat16: 9, torch.float16: 6}  # values of CUtensorMapDataType
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_MAP_BYTES, _MAP_ALIGNED = 128, 64  # size and alignment of a CUtensorMap, in bytes
Map = c_uint64 * (_MAP_BYTES // 8)


@lru_cache(maxsize=16384)
def tensor_map(address: int, kind: int, sizes: tuple[int, ...], strides: tuple[int, ...],
               box: tuple[int, ...]) -> ctypes.Array[c_uint64]:
    """Return the tensor map with which the tensor memory accelerator copies boxes of a tensor, in swizzled rows of 128
    bytes. The innermost dimension comes first; `strides`: those of the other dimensions, in bytes."""
    rank = len(sizes)
    buffer = (c_char * (_MAP_BYTES + _MAP_ALIGNED))()
    begin = -ctypes.addressof(buffer) % _MAP_ALIGNED
    code = _driver().cuTensorMapEncodeTiled(
        byref(buffer, begin), c_int(kind), c_uint32(rank), c_void_p(address), (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*strides), (c_uint32 * rank)(*box), (c_uint32 * rank)(*[1] * rank), c_int(0),
        c_int(_SWIZZLE_128), c_int(_PROMOTE_256), c_int(0))
    if code:
        raise CudaError(f"a tensor of {' x '.join(map(str, sizes))} cannot be described: {code}")
    return Map.from_buffer_copy(buffer, begin)


def sums_options(width: int) -> dict[str, object]:
    """Return the definitions that instructions.cuh needs for products of 64 rows by `width`."""
    sums = width // 2
    return {"WIDTH": width, "SUMS": sums, "SUMS_1": sums + 1, "SUMS_2": sums + 2,
            "NAMES": " COMMA ".join(f"%{i}" for i in range(sums)),
            "VALUES": " COMMA ".join(f"FOUR({i})" for i in range(0, sums, 4))}


@cache
def capable(device: torch.device) -> bool:
    """Return whether a device has wgmma."""
    return (device.type == "cuda" and not torch.version.hip
            and torch.cuda.get_device_capability(device) == CAPABILITY)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 2 for a CPU, which emulates a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
