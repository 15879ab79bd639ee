"""The CUDA C++ kernels of products with weights in codes; without a card they run emulated."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.cuda.coded_linear import Form
from support.emulated_cuda import EmulatedModule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _described(address: int, rows: int, layers: int, stride: int, box: int, box_layers: int,
               kind: int) -> ctypes.Array[ctypes.c_uint64]:
    """Describe x as the emulated copies read it."""
    said = struct.pack("<Qqqqqq", address, rows, layers, stride, box, box_layers)
    return cuda.Map.from_buffer_copy(said.ljust(128, b"\0"))


@cache
def _emulated(form: Form, dtype: torch.dtype, device: torch.device) -> EmulatedModule:
    return EmulatedModule(cuda.SOURCE, form.options(dtype), late=True)


@contextmanager
def coded_kernels() -> Iterator[None]:
    """Let there be kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(cuda, "kernels", _emulated)
            patch.setattr(cuda, "_map", _described)
        yield
