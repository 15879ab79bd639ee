"""Mixtures in CUDA C++ are close to the reference; a row has the same bits for any number of tokens, resident or not.

Without a GPU the kernels run emulated, and all code around them in Triton's interpreter, which truncates the last sum
where a GPU rounds it: there the sums of a few tokens, also in CUDA C++, are compared with those of tiles up to the last
bit.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spillover.kernels.cuda import mixture as cuda
from spillover.kernels.cuda.driver import compiled
from spillover.kernels.formats.base import Linear
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import mixture_reference

pytest.importorskip("triton")
from spillover.kernels.triton.moe import moe
from spillover.kernels.triton.moe.paged_moe import MultiPassMixture
from support.kernels.emulated_cuda import EmulatedModule
from support.kernels.mixtures import DEVICE, assert_near, case

EXPERTS, K = 4, 2
SHAPES = [  # format, hidden, inner, clamped; sums have several chunks, the last of them not full
    ("mxfp4", 416, 64, True),
    ("fp8", 160, 160, False),
    ("int4_128", 256, 128, False),
    ("int4_32", 128, 128, True),
    ("int8_64", 256, 128, False),
    ("gguf_Q4_1", 256, 128, False),
    ("gguf_Q6_K", 256, 256, False),
]
# Shapes for which the sums of a few tokens are a sufficient test.
FEW = [("gguf_Q4_K", 256, 256, False), ("gguf_Q5_1", 128, 128, False), ("gguf_Q6_K_and_Q4_K", 256, 256, False)]
SMALL = [("mxfp4", 32, 32, True), ("fp8", 32, 32, False), ("int4_64", 128, 128, False), ("int8_128", 128, 128, False),
         ("gguf_Q8_0_and_Q6_K_and_Q4_1", 128, 128, False)]
LONG = [("mxfp4", 3104, 32, True), ("fp8", 2080, 32, False)]  # more chunks than a block has warps


class Recorded:
    """Kernels that record the name of each launch."""

    def __init__(self, kernels: Any, launched: list[str]) -> None:
        self._kernels, self._launched = kernels, launched
        self.shared = kernels.shared

    def launch(self, kernel: str, *arguments: Any) -> None:
        self._launched.append(kernel)
        self._kernels.launch(kernel, *arguments)


def _emulated(form: str, device: torch.device) -> EmulatedModule:
    return EmulatedModule(cuda.SOURCE, (f"-DFORMAT={form}",), late=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each launched kernel; kernels run emulated without a GPU."""
    names: list[str] = []
    found = cuda.kernels if DEVICE == "cuda" else _emulated
    monkeypatch.setattr(cuda, "kernels", lambda form, device: Recorded(found(form, device), names))
    return names


def made(shape: tuple[str, int, int, bool], tokens: int,
         experts: int = EXPERTS) -> tuple[Tensor, Tensor, Experts, Experts, float | None]:
    """Return rows, scores and batch-invariant experts."""
    form, hidden, inner, clamped = shape
    x, scores, *stacks = case(form, tokens, hidden, inner, experts, torch.bfloat16, clamped)
    first, second = (Experts(Linear(s.weight.format.batch_invariant(), s.weight.shape, s.weight.tensors), s.bias)
                     for s in stacks)
    return x, scores, first, second, 1.5 if clamped else None


def exact(x: Tensor, scores: Tensor, first: Experts, second: Experts, limit: float | None) -> Tensor:
    stacks = [Experts(s.weight, None if s.bias is None else s.bias.float()) for s in (first, second)]
    return mixture_reference(x.float(), scores.float(), stacks[0], stacks[1], K, True, limit)


def same_but_for_the_last_bit(found: Tensor, expected: Tensor) -> bool:
    """Return whether they are equal on a GPU; without one, whether they differ by at most a truncation."""
    if DEVICE == "cuda":
        return torch.equal(found, expected)
    return bool(((found.view(torch.int16).int() - expected.view(torch.int16).int()).abs() <= 1).all())


@pytest.mark.parametrize("shape", [*SHAPES, *LONG, *FEW], ids=str)
def test_a_few_tokens_and_tiles_are_near_the_reference_and_each_other(
        shape: tuple[str, int, int, bool], launched: list[str]) -> None:
    x, scores, first, second, limit = made(shape, 2)
    few = moe.mixture(x, scores, first, second, K, True, limit)
    tiles = moe.mixture(x, scores, first, second, K, True, limit, few_tokens=0)
    assert launched == [f"experts_{name}" for name in ("gate_up_pairs", "down_pairs", "gate_up_16", "down_16")]
    assert_near(few.float(), exact(x, scores, first, second, limit), 5e-3)
    assert same_but_for_the_last_bit(few, tiles)


def test_activations_larger_than_a_float16_are_multiplied_with_fp8_experts(launched: list[str]) -> None:
    x, scores, first, second, limit = made(("fp8", 160, 160, False), 2)
    x *= 256
    expected = exact(x, scores, first, second, limit)
    assert expected.abs().max() > 65504
    assert_near(moe.mixture(x, scores, first, second, K, True, limit).float(), expected, 5e-3)


# Rows per expert for which a tile uses other instructions, or a second tile is needed.
@pytest.mark.parametrize(("shape", "rows"), [*zip(SHAPES, itertools.cycle((8, 31))),
                                             *((shape, 70) for shape in SMALL)], ids=str)
def test_a_row_has_the_same_bits_whatever_the_tile(
        shape: tuple[str, int, int, bool], rows: int, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, scores, first, second, limit = made(shape, rows, experts=2)  # each expert gets all rows
    route, routed = moe.route, {}
    monkeypatch.setattr(moe, "route", lambda scores, x, *rest: routed[len(x)] if len(x) in routed else
                        routed.setdefault(len(x), route(scores, x, *rest)))  # the routing is the same for every tile
    form = cuda.KERNEL_CONFIGS[first.gemm.code]
    every, results = form.many, {}
    for tile in every:
        monkeypatch.setitem(form.__dict__, "many", {tile: every[tile]})
        results[tile] = moe.mixture(x, scores, first, second, K, True, limit, few_tokens=0)
    assert launched == [f"experts_{product}_{tile}" for tile in (16, 64, 128) for product in ("gate_up", "down")]
    assert all(torch.equal(result, results[16]) for result in results.values())
    assert torch.equal(moe.mixture(x[4:], scores[4:], first, second, K, True, limit, few_tokens=0), results[16][4:])
    assert_near(results[16].float(), exact(x, scores, first, second, limit), 5e-3)


def test_tiles_grow_with_the_rows_of_an_expert(launched: list[str]) -> None:
    x, _, first, second, _ = made(SHAPES[0], 1)
    gemm = cuda.cuda_gemm(first.gemm, x, second.width, K)
    assert [gemm.many_tiles(rows)[0].tokens for rows in (0.5, 10, 11, 96, 97, 256)] == [16, 16, 64, 64, 128, 128]


def test_tiles_that_a_device_has_no_shared_memory_for_are_left_out(
        launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, first, second, _ = made(SHAPES[0], 1)
    found = cuda.kernels("Mxfp4", x.device)
    assert found is not None
    monkeypatch.setattr(cuda, "kernels", lambda form, device: found)
    for shared, sizes in ((226, [16, 64, 128]), (161, [16, 64]), (98, [16, 64]), (97, [16])):
        found.shared = shared << 10
        many = cuda.cuda_gemm(first.gemm, x, second.width, K).many
        assert sorted(tiles[0].tokens for tiles in many.values()) == sizes
    found.shared = 48 << 10
    assert cuda.cuda_gemm(first.gemm, x, second.width, K) is first.gemm


class Slots:
    """Experts in slots with gaps between them, as in an arena; one slot is empty."""

    def __init__(self, first: Experts, second: Experts) -> None:
        self.at = torch.tensor([3, 0, 4, 1], dtype=torch.int32, device=DEVICE)
        self.first, self.second = (Experts(s.weight.map(self._spread), None if s.bias is None else self._spread(s.bias))
                                   for s in (first, second))

    def _spread(self, tensor: Tensor) -> Tensor:
        size = tensor[0].nbytes
        arena = torch.full((EXPERTS + 1, size + 256 - size % 256 + 256), 0x7F, dtype=torch.uint8, device=DEVICE)
        spread = arena[:, :size].view(tensor.dtype).unflatten(1, tensor.shape[1:])
        spread[self.at.long()] = tensor
        return spread

    def row(self, *experts: int) -> Tensor:
        there = torch.zeros(EXPERTS, dtype=torch.bool, device=DEVICE)
        there[list(experts)] = True
        return torch.where(there, self.at, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("few", [True, False])
def test_passes_over_slots_are_the_resident_mixture_to_the_bit(
        shape: tuple[str, int, int, bool], few: bool, launched: list[str]) -> None:
    x, scores, first, second, limit = made(shape, 3)
    slots = Slots(first, second)
    kwargs = {"few_tokens": 8 if few else 0}
    resident = moe.mixture(x, scores, first, second, K, True, limit, few_tokens=0)

    def begin() -> MultiPassMixture:
        return MultiPassMixture(x, scores, K, True, first.gemm, second.width, limit, **kwargs)

    passes = begin()
    passes.add(slots.first, slots.second, slots.row(1, 2))
    passes.add(slots.first, slots.second, slots.row(0, 3))
    assert torch.equal(passes.end(), resident)
    whole = begin().single_pass(slots.first, slots.second, slots.row(0, 1, 2, 3))
    assert torch.equal(whole, moe.mixture(x, scores, first, second, K, True, limit, **kwargs))
    assert ("experts_down_pairs" in launched) is few


@pytest.mark.parametrize(("dtype", "hidden", "inner"), [
    (torch.float16, 64, 64), (torch.bfloat16, 80, 64), (torch.bfloat16, 64, 48),
])
def test_what_they_do_not_take_goes_through_triton(
        dtype: torch.dtype, hidden: int, inner: int, launched: list[str]) -> None:
    taken, _, first, *_ = made(("fp8", 64, 64, False), 1)
    x = torch.empty(1, hidden, dtype=dtype, device=taken.device)
    assert cuda.cuda_gemm(first.gemm, x, inner, K) is first.gemm
    assert cuda.cuda_gemm(first.gemm, taken, 64, K).few == cuda.FEW


def test_only_formats_with_one_order_take_them(launched: list[str]) -> None:
    x, _, first, second = case("mxfp4", 1, 64, 64, EXPERTS, torch.bfloat16, True)
    assert cuda.cuda_gemm(first.gemm, x, second.width, K) is first.gemm


def test_without_nvrtc_triton_serves_and_the_log_says_so_once(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*arguments: object) -> None:
        raise compiled.CudaError("Could not find any NVRTC library\nmore")

    x, _, first, second, _ = made(("mxfp4", 64, 32, True), 2)
    found, capability = cuda.kernels, (9, 0)
    found.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compiled, "Module", fails)
    monkeypatch.setattr(cuda, "kernels", lambda form, device: found(form, torch.device("cuda", 0)))
    with caplog.at_level("WARNING", "spillover.kernels"):
        for _ in range(2):
            assert cuda.cuda_gemm(first.gemm, x, second.width, K) is first.gemm
        found.cache_clear()
        capability = 7, 5
        assert cuda.cuda_gemm(first.gemm, x, second.width, K) is first.gemm
    found.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "mixtures go through Triton's kernels: Could not find any NVRTC library",
        "mixtures go through Triton's kernels: compute capability 7.5, and others need 8.0"]


def test_without_a_card_triton_serves() -> None:
    assert cuda.kernels("Mxfp4", torch.device("cpu")) is None


class Nvrtc:
    """The part of NVRTC that the cache uses; it compiles everything except text marked as wrong."""

    def __init__(self) -> None:
        self.compiled: list[bytes] = []
        self.release = 8

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = 12, self.release
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, *rest: object) -> int:  # noqa: N802
        self._text = text
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        self.compiled.append(b" ".join(options))
        return int(b"wrong" in self._text)

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = 64
        return 0

    def nvrtcGetProgramLog(self, program: Any, log: Any) -> int:  # noqa: N802
        log.value = b"m.cu(1): error"
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = 5
        return 0

    def nvrtcGetCUBIN(self, program: Any, binary: ctypes.Array[ctypes.c_char]) -> int:  # noqa: N802
        binary.raw = b"\0bin%d" % len(self.compiled)
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        return 0


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Nvrtc]:
    fake = Nvrtc()
    monkeypatch.setattr("torch.cuda._utils._get_gpu_rtc_library", lambda: fake)
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    return fake


def test_a_source_is_compiled_once_for_a_device_and_a_compiler(nvrtc: Nvrtc, tmp_path: Any) -> None:
    source = tmp_path / "m.cu"
    source.write_text("void kernel() {}")
    assert compiled.compiled(source, ("sm_90",)) == b"\0bin1"
    assert compiled.compiled(source, ("sm_90",)) == b"\0bin1"
    options = f"sm_90 --include-path={tmp_path / 'include'} --device-as-default-execution-space"
    assert nvrtc.compiled == [options.encode()]
    assert compiled.compiled(source, ("sm_120",)) == b"\0bin2"
    nvrtc.release = 9
    assert compiled.compiled(source, ("sm_90",)) == b"\0bin3"
    source.write_text("void kernel() { }")
    assert compiled.compiled(source, ("sm_90",)) == b"\0bin4"
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "included.cuh").write_text("int included;")
    assert compiled.compiled(source, ("sm_90",)) == b"\0bin5"
    assert len(list((tmp_path / "cache" / "cuda").iterdir())) == 5


def test_without_a_cache_folder_it_is_compiled_every_time(
        nvrtc: Nvrtc, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "m.cu"
    source.write_text("void kernel() {}")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "file"))
    assert [compiled.compiled(source, ()) for _ in range(2)] == [b"\0bin1", b"\0bin2"]


def test_what_the_compiler_complains_about_is_told(nvrtc: Nvrtc, tmp_path: Any) -> None:
    source = tmp_path / "m.cu"
    source.write_text("wrong")
    with pytest.raises(compiled.CudaError, match=r"m\.cu\(1\): error"):
        compiled.compiled(source, ())
    assert list((tmp_path / "cache" / "cuda").iterdir()) == []
