"""The CUDA C++ kernel of products with one order of sums on a CPU: see emulated_gemm.h."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import torch

from spillover.kernels.cuda.ordered_gemm import SOURCE, Cut, Map
from support.emulated_cuda import FLAGS, built

_EMULATOR = Path(__file__).parent / "emulated_gemm.h"


class EmulatedGemm:
    """Launches as kernels.cuda.compiled.Module does."""

    def __init__(self, cut: Cut, chunks: int, dtype: torch.dtype, bias: bool, device: torch.device) -> None:
        half = ("-DHALF_PRECISION",) if dtype is torch.float16 else ()
        self._emulate = _library((*cut.options(chunks, dtype, bias), *half)).emulate
        self._emulate.restype = ctypes.c_bool

    def launch(self, kernel: str, grid: int, threads: int, arguments: ctypes.Structure, shared: int = 0,
               early: bool = False) -> None:
        assert kernel == "ordered_gemm"
        ended = self._emulate(ctypes.c_uint(grid), ctypes.c_uint(threads), ctypes.byref(arguments))
        assert ended, "threads wait for one another"


def described(address: int, rows: int, inner: int, stride: int, box: int, kind: int) -> ctypes.Array[ctypes.c_uint64]:
    """Describe a matrix as the emulated copies read it."""
    return Map.from_buffer_copy(struct.pack("<Qqqqq", address, rows, inner, stride, box).ljust(128, b"\0"))


@cache
def _library(options: tuple[str, ...]) -> ctypes.CDLL:
    return built(("-x", "c++", *FLAGS, "-Wno-psabi", *options, f'-DEMULATED="{_EMULATOR}"'), SOURCE, (_EMULATOR,))
