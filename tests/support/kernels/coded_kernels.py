"""The CUDA C++ kernels for products with quantised weights (codes); without a GPU they run emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.cuda.coded_linear import TileForm
from support.kernels.emulated_cuda import EmulatedModule, described

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def _emulated(form: TileForm, dtype: torch.dtype, device: torch.device) -> EmulatedModule:
    return EmulatedModule(cuda.SOURCE, form.for_inputs(dtype).options(dtype), late=True)


@contextmanager
def coded_kernels() -> Iterator[None]:
    """Make the kernels available, emulated on a machine without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(cuda, "kernels", _emulated)
            patch.setattr(cuda, "tensor_map", described)
        yield
