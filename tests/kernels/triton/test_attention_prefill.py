"""Prefill attention over 16-bit keys and values in CUDA C++, emulated without a GPU: its results, and its single order
of summation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spillover.kernels import native
from spillover.kernels.cuda import attention_prefill as prefill
from spillover.kernels.cuda.attention import KernelConfig
from spillover.kernels.triton.attention import ordered_prefill
from support.kernels.emulated_cuda import EmulatedModule, described
from support.kernels.paged_attention import DEVICE, DTYPES, TOLERANCE, Case, error

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")

HALF = DTYPES[1]
# Emulated products, and multiply-adds in the interpreter, are rounded at other points.
EXACT = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {"rtol": 2e-3, "atol": 2e-3}


def emulated(source: Path, config: KernelConfig, device: torch.device, late: bool = True) -> EmulatedModule:
    """Stand in for a GPU's kernels; if `late`, copies into shared memory complete only when they are waited for."""
    return EmulatedModule(source, config.options, late)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that receives for each call whether the kernel was available."""
    calls: list[bool] = []

    def recorded(*given: object) -> bool:
        calls.append(prefill.attend_prefill(*given))  # type: ignore[arg-type]
        return calls[-1]

    if DEVICE == "cpu":
        monkeypatch.setattr(prefill, "kernels", emulated)
        monkeypatch.setattr(prefill, "tensor_map", described)
    monkeypatch.setattr(ordered_prefill, "attend_prefill", recorded)
    return calls


def by_triton(case: Case, monkeypatch: pytest.MonkeyPatch, sinks: bool) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(ordered_prefill, "attend_prefill", lambda *_: False)
        return case.found(sinks=sinks)


@pytest.mark.parametrize(("heads", "kv_heads", "block_size", "window"), [
    (2, 1, 16, None),
    (2, 1, 64, 100),
    (3, 1, 32, None),
    (1, 1, 128, 70),
])
def test_it_is_attention_and_has_the_bits_of_tritons_kernel(
        heads: int, kv_heads: int, block_size: int, window: int | None, launched: list[bool],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fill a tile of queries, end in either half of one, or follow cached tokens have the right bits."""
    case = Case([128, 40, 1, 70, 17], [0, 150, 30, 63, 300], heads, kv_heads, prefill.DIM, block_size, HALF,
                window=window)
    sinks = window is not None
    found = case.found(sinks=sinks)
    assert launched == [True]
    assert error(found, case.expected(sinks=sinks)) < TOLERANCE[HALF]
    torch.testing.assert_close(found, by_triton(case, monkeypatch, sinks), **EXACT)


def test_a_long_prompt_has_the_bits_of_tritons_kernel(launched: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 128 and of 256 keys, more tiles than stages and, on a GPU, many rows give the same bits."""
    count, cached = (3000, 2500) if DEVICE == "cuda" else (66, 1300)
    case = Case([count], [cached], 2, 1, prefill.DIM, 16, HALF)
    found = case.found()
    assert launched == [True]
    torch.testing.assert_close(found, by_triton(case, monkeypatch, False), **EXACT)


def test_copies_into_shared_memory_may_end_at_once(launched: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal if emulated copies complete at once or when waited for: no data is used in between."""
    case = Case([100], [700], 1, 1, prefill.DIM, 16, HALF)
    late = case.found()
    if DEVICE == "cpu":
        monkeypatch.setattr(prefill, "kernels", partial(emulated, late=False))
    assert torch.equal(case.found(), late)
    assert launched == [True, True]


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_in_any_chunk_of_its_prompt(window: int | None, launched: list[bool]) -> None:
    case = Case([150], [10], 1, 1, prefill.DIM, 16, HALF, window=window)
    whole = case.found(sinks=True)
    for first, last in ((0, 130), (130, 132), (64, 66), (147, 150)):
        assert torch.equal(case.attend(*case.part(0, first, last), sinks=True), whole[first:last])
    assert launched == [True] * 5


@pytest.mark.parametrize(("dtype", "dim", "block_size", "kv_dtype"), [
    (torch.float32, 128, 16, "auto"), (HALF, 64, 16, "auto"), (HALF, 128, 8, "auto"), (HALF, 128, 16, "fp8"),
])
def test_other_shapes_have_other_kernels(dtype: torch.dtype, dim: int, block_size: int, kv_dtype: str,
                                         launched: list[bool]) -> None:
    case = Case([3], [70], 2, 1, dim, block_size, dtype, kv_dtype)
    assert error(case.found(), case.expected()) < TOLERANCE[dtype]
    assert not any(launched)
