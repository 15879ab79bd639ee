"""Every CUDA C++ source compiles for an H200, without one: NVRTC from PyPI needs no GPU.

NVRTC takes 1 to 15 s per form of a source, so only one or two forms per branch of the sources are compiled; the tests
of emulated kernels check the results of all forms.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch

from spillover.kernels.cuda import (
    attention,
    attention_few,
    attention_prefill,
    coded_linear,
    fp8_linear,
    mixture,
    ordered_gemm,
)
from spillover.kernels.cuda.driver import compiled
from spillover.kernels.cuda.peers import exchange
from spillover.kernels.formats.coded_cuda import tile_form
from spillover.kernels.formats.gguf_codes import CODE_FORMS

H200 = "--gpu-architecture=sm_90a", "--std=c++17"
PROCESSORS = 132
HALF = torch.bfloat16


def wanted() -> list[tuple[Path, tuple[str, ...]]]:
    shape = fp8_linear.Shape(4096, 4096, blocked=True)
    listed = [(mixture.SOURCE, (f"-DFORMAT={form}",)) for form in ("Mxfp4", "Fp8", "Gguf8_halves_offset")]
    listed += [(coded_linear.SOURCE, tile_form(CODE_FORMS[kind]).options(HALF)) for kind in ("Q4_K",)]
    listed += [(ordered_gemm.SOURCE, ordered_gemm.choose_cut(rows, 4096, 4096, PROCESSORS).options(
        ordered_gemm.product_chunks(4096, 4096)[0], HALF, False)) for rows in (64, 4096)]
    listed += [(cut.source, cut.options(shape.config, HALF)) for cut in (fp8_linear.choose_cut(rows, shape, PROCESSORS)
                                                                       for rows in (1, 4096))]
    normed = fp8_linear.Shape(28672, 4096, blocked=True, gated=True, normed=True)
    listed += [(cut.source, cut.options(normed.config, HALF)) for cut in (fp8_linear.choose_cut(1, normed, PROCESSORS),
                                                                        fp8_linear.Rounding(normed.inner))]
    listed += [(source, attention.KernelConfig(128, 4, 16, "fp8", HALF).options)
               for source in (attention.NEW_TOKENS, attention.PROMPTS)]
    listed += [(attention_few.SOURCE, attention.KernelConfig(dim, 8, 16, "auto", HALF).options) for dim in (64, 256)]
    listed += [(attention_prefill.SOURCE, attention.KernelConfig(128, 4, 16, "auto", HALF).options)]
    return [*listed, (exchange.SOURCE, ())]


def nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from its package; return None if it is not installed."""
    try:
        listed = files("nvidia-cuda-nvrtc") or []
    except PackageNotFoundError:
        return None
    library = next(path for path in listed if path.name.startswith("libnvrtc.so"))
    return ctypes.CDLL(str(library.locate()))


def test_every_source_compiles_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source compiles; those compiled before with the same options are taken from the cache."""
    library = nvrtc()
    if library is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    listed = wanted()
    assert {source for source, _ in listed} == set(Path(mixture.__file__).parent.rglob("*.cu"))

    monkeypatch.setattr("torch.cuda._utils._get_gpu_rtc_library", lambda: library)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for made in pool.map(lambda each: compiled.compiled(each[0], (*H200, *each[1])), listed):
            assert made.startswith(b"\x7fELF")
