"""Attention over quantised KV in CUDA C++, emulated without a GPU: its results, and its single order of summation."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from spillover.kernels import native
from spillover.kernels.cuda import attention as cuda
from spillover.kernels.cuda.driver import compiled
from spillover.kernels.triton.attention import ordered_decode, ordered_prefill
from spillover.kernels.triton.attention import ordered_splits as splits
from support.kernels.emulated_cuda import EmulatedModule
from support.kernels.paged_attention import DEVICE, DTYPES, TOLERANCE, Case, error

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


FORMS = [  # (KV type, query heads, key heads, head size, block size)
    ("fp8", 4, 1, 128, 16),
    ("int8", 12, 1, 64, 32),
]
EXACT = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {"rtol": 2e-3, "atol": 2e-3}


class Recorded:
    """Kernels that record the name of each launch."""

    def __init__(self, kernels: Any, launched: list[str]) -> None:
        self._kernels, self._launched = kernels, launched

    def launch(self, kernel: str, *rest: Any, **named: Any) -> None:
        self._launched.append(kernel.removeprefix("attention_codes_"))
        self._kernels.launch(kernel, *rest, **named)


def emulated(source: Path, config: cuda.KernelConfig, device: torch.device, late: bool = True) -> EmulatedModule:
    """Stand in for a GPU's kernels; if `late`, copies into shared memory complete only when they are waited for."""
    return EmulatedModule(source, config.options, late)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the suffix of each launched kernel's name."""
    names: list[str] = []
    kernels = cuda.kernels if DEVICE == "cuda" else emulated
    monkeypatch.setattr(cuda, "kernels", lambda *given: Recorded(kernels(*given), names))
    return names


def case_of(form: tuple[str, int, int, int, int], counts: list[int], cached: list[int],
            window: int | None = None) -> Case:
    kv_dtype, *shape = form
    return Case(counts, cached, *shape, DTYPES[1], kv_dtype, window=window)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_attention_over_the_decoded_pool(form: tuple[str, int, int, int, int], window: int | None,
                                               launched: list[str]) -> None:
    """Results are right for new tokens (one with a program per piece) and prompts; with and without sinks."""
    case = case_of(form, [1, 70, 1, 1, 5, 1], [70, 20, 0, 63, 3, 700], window)
    sinks = window is not None
    assert error(case.found(sinks=sinks), case.expected(sinks=sinks)) < TOLERANCE[DTYPES[1]]
    assert launched == ["16_3" if form[1] == 12 else "8_3", "prompt"]


def test_copies_into_shared_memory_may_end_at_once(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal if emulated copies complete at once or when waited for: no data is used in between."""
    case = case_of(FORMS[0], [1, 1, 40], [70, 700, 300])
    late = case.found()
    assert launched == ["8_3", "prompt"]
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda, "kernels", partial(emulated, late=False))
    assert torch.equal(case.found(), late)


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_has_the_same_bits_as_a_new_token_and_in_its_prompt(window: int | None, launched: list[str],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A new token's bits do not depend on having a program per sequence or per piece, or on the number of programs."""
    case = case_of(FORMS[0], [17], [1200], window)
    prompt = case.found(sinks=True)
    assert launched == ["prompt"]
    for busy, many in ((1, 10**9), (10**9, 10**9), (1, 1)):
        monkeypatch.setattr(splits, "BUSY", busy)
        monkeypatch.setattr(cuda, "MANY", many)
        for row in (0, 9, 16):
            assert torch.equal(case.attend(*case.part(0, row, row + 1), sinks=True), prompt[row:row + 1])
    assert launched == ["prompt"] + 6 * ["8_3"] + 3 * ["8_4"]


def test_a_few_new_tokens_of_a_long_sequence_are_tritons(launched: list[str]) -> None:
    """Triton's kernel serves them, with the same bits on a GPU; an emulated product is rounded at another point."""
    case = case_of(FORMS[0], [16], [1100])
    few = case.found(sinks=True)
    assert not launched
    alone = case.attend(*case.part(0, 9, 10), sinks=True)
    assert launched == ["8_3"]
    torch.testing.assert_close(alone, few[9:10], **EXACT)


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_in_any_chunk_of_its_prompt(window: int | None, launched: list[str]) -> None:
    case = case_of(FORMS[1], [150], [10], window)
    whole = case.found(sinks=True)
    assert launched == ["prompt"]
    for first, last in ((0, 1), (0, 130), (130, 132), (64, 65), (149, 150)):
        assert torch.equal(case.attend(*case.part(0, first, last), sinks=True), whole[first:last])
    assert set(launched) == {"prompt", "16_3"}


def test_it_gives_what_triton_gives(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal to the bit on a GPU; an emulated product is rounded at another point."""
    for form, counts, cached in ((FORMS[0], [1, 70], [300, 10]), (FORMS[1], [1, 5], [130, 60])):
        case = case_of(form, counts, cached)
        here = case.found(sinks=True)
        with monkeypatch.context() as patch:
            patch.setattr(ordered_decode, "attend_codes", lambda *_: False)
            patch.setattr(ordered_prefill, "attend_prompts", lambda *_: False)
            there = case.found(sinks=True)
        torch.testing.assert_close(here, there, **EXACT)
    assert len(launched) == 4


@pytest.mark.parametrize(("dtype", "heads", "dim", "block_size", "kv_dtype"), [
    (torch.float32, 2, 64, 16, "fp8"), (DTYPES[1], 2, 32, 16, "fp8"), (DTYPES[1], 2, 64, 8, "int8"),
    (DTYPES[1], 2, 64, 16, "auto"), (DTYPES[1], 17, 64, 16, "fp8"),
])
def test_other_shapes_are_tritons(dtype: torch.dtype, heads: int, dim: int, block_size: int, kv_dtype: str,
                                  launched: list[str]) -> None:
    case = Case([1], [70], heads, 1, dim, block_size, dtype, kv_dtype)
    assert error(case.found(), case.expected()) < TOLERANCE[dtype]
    assert not launched


def test_without_a_compiler_triton_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise compiled.CudaError("no NVRTC\nat all")

    monkeypatch.setattr(compiled, "Module", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config, device = cuda.KernelConfig(128, 4, 16, "fp8", torch.bfloat16), torch.device("cuda", 0)
    find = cuda.kernels.__wrapped__
    with caplog.at_level(logging.WARNING):
        assert find(cuda.NEW_TOKENS, config, device) is None
    assert caplog.messages == ["attention goes through Triton's kernels: no NVRTC"]
    monkeypatch.setattr(compiled, "Module", lambda *given: given)
    for capability, served in (((8, 6), set()), ((8, 9), {cuda.NEW_TOKENS}), ((9, 0), {cuda.NEW_TOKENS, cuda.PROMPTS}),
                               ((12, 0), {cuda.NEW_TOKENS})):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert {source for source in (cuda.NEW_TOKENS, cuda.PROMPTS) if find(source, config, device)} == served


def test_pieces_begin_where_the_splits_have_them(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One program has the bits of one program per piece; a wrong number of pieces would change them."""
    case = case_of(FORMS[1], [1], [4500])
    found = {}
    for busy, items in ((1, 1), (10**9, splits.num_pieces(4501))):
        monkeypatch.setattr(splits, "BUSY", busy)
        assert len(splits.decode_splits(np.array([0]), np.array([0]), np.array([4501]), 1, None)) == items
        found[busy] = case.found()
    assert torch.equal(found[1], found[10**9])
    assert len(launched) == 2
