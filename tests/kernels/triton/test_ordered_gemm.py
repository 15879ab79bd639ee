"""Products in CUDA C++ have the bits that their order of summation defines, however they are cut.

Without a GPU the kernel runs emulated, which checks its schedule, its addresses and its order of summation; on a GPU it
is compared with the Triton kernel, to the bit.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spillover.kernels.cuda import ordered_gemm
from spillover.kernels.cuda.driver import compiled
from spillover.kernels.cuda.driver.tensor_map import CAPABILITY
from spillover.kernels.cuda.ordered_gemm import CUTS, LARGE, Cut
from spillover.kernels.extents import product_chunks
from support.kernels.emulated_cuda import EmulatedModule, described

CUDA = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
# (cut, rows, channels, inner): the last tile, the last step and the last chunk are not full, or empty.
CASES = [
    (Cut(64), 150, 72, 200),
    (Cut(32), 1100, 40, 72),  # more tiles of rows than a band has
    (Cut(32, 2), 300, 40, 256),
    (Cut(96), 130, 104, 1160),
    (Cut(40, groups=1), 24, 136, 200),  # fewer rows than a tile has
    (Cut(72, groups=3), 250, 72, 1032),  # the fourth chunk is empty
    (Cut(40, groups=3, spread=True), 200, 104, 1160),
    (Cut(64, groups=1, spread=True), 17, 24, 1032),  # fewer channels too
]

GATED = [
    (Cut(64, gated=True), 150, 80, 200),  # tiles overlap, as the last one begins earlier
    (Cut(32, 2, gated=True), 300, 96, 72),
    (Cut(48, groups=3, gated=True), 200, 208, 1032),
    (Cut(48, groups=1, spread=True, gated=True), 17, 112, 1160),
    (Cut(80, groups=1, spread=True, gated=True), 24, 48, 1032),  # fewer channels than a tile has
]


def operands(rows: int, channels: int, inner: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, w, bias = (torch.randn(shape, generator=generator).to(dtype).to(device)
                  for shape in ((rows, inner), (channels, inner), (channels,)))
    return x, w, bias


def in_order(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the order's definition, adding one product at a time."""
    chunks, chunk = product_chunks(w.shape[0], w.shape[1])
    total = torch.zeros(x.shape[0], w.shape[0])
    columns, rows = x.float().T.contiguous(), w.float().T.contiguous()
    for begin in range(0, chunks * chunk, chunk):
        sums = torch.zeros_like(total)
        for k in range(begin, min(begin + chunk, x.shape[1])):
            sums += columns[k][:, None] * rows[k][None]
        total += sums
    return (total if bias is None else total + bias.float()).to(x.dtype)


def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernel on the CPU, as one block that processes all tiles."""
    monkeypatch.setattr(ordered_gemm, "kernel", lambda cut, chunks, dtype, bias, device: EmulatedModule(
        ordered_gemm.SOURCE, cut.options(chunks, dtype, bias)))
    monkeypatch.setattr(ordered_gemm, "processors", lambda device: 1)
    monkeypatch.setattr(ordered_gemm, "tensor_map", described)
    monkeypatch.setattr(ordered_gemm, "_plan", ordered_gemm._plan.__wrapped__)


@pytest.mark.parametrize(("cut", "rows", "channels", "inner"), CASES)
def test_sums_have_the_order_of_the_matrix(cut: Cut, rows: int, channels: int, inner: int,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    dtype = torch.float16 if inner == 256 else torch.bfloat16
    x, w, bias = operands(rows, channels, inner, dtype, "cpu")
    given = bias if inner in (200, 1160) else None
    out = torch.full((rows, channels), torch.nan, dtype=dtype)
    assert ordered_gemm.multiply(x, w, given, out, False, cut=cut)
    assert torch.equal(out, in_order(x, w, given))


@pytest.mark.parametrize(("cut", "rows", "channels", "inner"), GATED)
def test_a_gate_is_part_of_the_product(cut: Cut, rows: int, channels: int, inner: int,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    x, w, bias = operands(rows, channels, inner, torch.bfloat16, "cpu")
    given = bias if inner == 200 else None
    out = torch.full((rows, channels // 2), torch.nan, dtype=torch.bfloat16)
    assert ordered_gemm.multiply(x, w, given, out, False, gated=True, cut=cut)
    gate, up = in_order(x, w, given).float().chunk(2, 1)
    # The emulated sigmoid is that of the C library.
    torch.testing.assert_close(out, torch.nn.functional.silu(gate).bfloat16() * up.bfloat16(), rtol=0.01, atol=1e-6)


def test_many_rows_are_multiplied_so_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from spillover.kernels.triton import ordered_linear

    emulated(monkeypatch)
    by_triton: list[tuple[int, int]] = []
    monkeypatch.setattr(ordered_linear, "_launch_many",
                        lambda x, w, bias, out, tile: by_triton.append((x.shape[0], w.shape[0])))
    for rows, channels in ((17, 48), (129, 48), (256, 40), (257, 40), (130, 44)):  # 44 is no multiple of 8
        x, w, bias = operands(rows, channels, 72, torch.bfloat16, "cpu")
        out = ordered_linear.ordered_linear(x, w, bias)
        assert (rows, channels) in by_triton or torch.equal(out, in_order(x, w, bias))
    assert by_triton == [(130, 44)]


def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels for products of up to the maximum rows are compiled; none where the kernel is not used."""
    made: set[tuple[str, ...]] = set()
    monkeypatch.setattr(compiled, "compiled", lambda source, options: made.add(options))
    device = torch.device("cpu")
    ordered_gemm.prepare([(1024, 2048, False, False)], torch.bfloat16, device, 256)
    assert not made
    monkeypatch.setattr(ordered_gemm, "capable", lambda device: True)
    monkeypatch.setattr(ordered_gemm, "processors", lambda device: 132)
    monkeypatch.setattr(compiled, "architecture", lambda device: ())
    ordered_gemm.prepare([(1024, 2048, False, False), (1024, 2048, False, True), (1021, 2048, False, False),
                          (1032, 2048, False, True)], torch.bfloat16, device, 256)
    cuts = {ordered_gemm.choose_cut(rows, 1024, 2048, 132, gated)
            for rows in (64, 128, 192, 256) for gated in (False, True)}
    assert made == {cut.options(4, torch.bfloat16, False) for cut in cuts}


def test_it_serves_only_what_it_can_and_says_so() -> None:
    x, w, _ = operands(20, 64, 128, torch.bfloat16, "cpu")
    out = torch.empty(20, 64, dtype=torch.bfloat16)
    assert not ordered_gemm.multiply(x, w, None, out, False)  # no GPU
    assert not ordered_gemm.multiply(x.float(), w.float(), None, out.float(), False)


@pytest.mark.parametrize(("rows", "channels", "inner", "cut"), [
    # fastest of those timed on an H200: one wave of the narrowest tiles that fill it, and large tiles for many rows
    (512, 4096, 4096, Cut(128)), (512, 6144, 4096, Cut(192)),
    (2048, 1024, 2048, Cut(128)), (512, 34816, 5120, Cut(192, 2)), (2048, 6144, 1024, Cut(192)),
    (192, 7168, 5120, Cut(56, groups=3)), (192, 5120, 17408, Cut(176, groups=3, spread=True)),
    (64, 1024, 2048, Cut(40, groups=1, spread=True)), (64, 151936, 1024, Cut(232, groups=1)),
])
def test_the_cut_keeps_multiprocessors_busy(rows: int, channels: int, inner: int, cut: Cut) -> None:
    assert ordered_gemm.choose_cut(rows, channels, inner, 132) == cut


def test_every_cut_fits_an_h200() -> None:
    for cut in (*CUTS, *LARGE):
        assert cut.shared <= 226 << 10
        assert cut.stages >= 4


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_it_compiles_for_an_h200_without_spilled_registers(tmp_path: Path) -> None:
    for cut, chunks in ((Cut(224), 4), (Cut(192, groups=3, spread=True), 4), (Cut(96, groups=3, gated=True), 4),
                        (Cut(224, gated=True), 4), *((cut, 1) for cut in LARGE),
                        *((cut._replace(gated=True), 1) for cut in LARGE)):
        options = cut.options(chunks, torch.bfloat16, True)
        done = subprocess.run(
            ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", *options,
             f"-I{ordered_gemm.SOURCE.parent / 'include'}", ordered_gemm.SOURCE, "-o", tmp_path / "kernel.cubin"],
            check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert " 0 bytes spill stores" in done.stderr, done.stderr
        assert "serialized" not in done.stderr, done.stderr  # products that wait for one another


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cut", "rows", "channels", "inner"), [
    *CASES, *((cut, 257, 1032, 1160) for cut in CUTS), *((cut, 300, 16456, 1088) for cut in (*CUTS, *LARGE)),
])
def test_bits_are_those_of_the_triton_kernel(cut: Cut, rows: int, channels: int, inner: int,
                                             dtype: torch.dtype) -> None:
    from spillover.kernels.triton.ordered_linear import SQUARE, ordered_linear

    x, w, bias = operands(rows, channels, inner, dtype, "cuda")
    for given in (None, bias):
        out = torch.full((rows, channels), torch.nan, dtype=dtype, device="cuda")
        assert ordered_gemm.multiply(x, w, given, out, True, cut=cut)
        assert torch.equal(out, ordered_linear(x, w, given, SQUARE))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cut", "rows", "channels", "inner"), [
    *GATED, *((cut._replace(gated=True), 300, 16464, 1088) for cut in (*CUTS, *LARGE)),
])
def test_a_gate_has_the_bits_of_kernels_by_themselves(cut: Cut, rows: int, channels: int, inner: int,
                                                      dtype: torch.dtype) -> None:
    from spillover.kernels.triton.activation import silu_and_mul
    from spillover.kernels.triton.ordered_linear import SQUARE, ordered_linear, ordered_linear_silu

    x, w, bias = operands(rows, channels, inner, dtype, "cuda")
    for given in (None, bias):
        out = torch.full((rows, channels // 2), torch.nan, dtype=dtype, device="cuda")
        assert ordered_gemm.multiply(x, w, given, out, True, gated=True, cut=cut)
        assert torch.equal(out, silu_and_mul(ordered_linear(x, w, given, SQUARE)))
        assert torch.equal(out[:5], ordered_linear_silu(x[:5], w, given))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs compute capability 9.0")
def test_every_number_has_the_sigmoid_of_few_rows() -> None:
    """All finite bfloat16 numbers, each as the gate of one row, give the same sigmoid as in the kernel for few rows."""
    from spillover.kernels.triton.ordered_linear import ordered_linear_silu

    every = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = torch.zeros((1 << 16), 64, dtype=torch.bfloat16)
    x[:, 0] = torch.where(every.isfinite(), every, 0)
    w = torch.zeros(32, 64, dtype=torch.bfloat16)
    w[:16, 0] = w[16:, 1] = 1
    x[:, 1] = 1
    x, w = x.cuda(), w.cuda()
    many = ordered_linear_silu(x, w)
    few = torch.cat([ordered_linear_silu(part, w) for part in x[::7].split(16)])
    assert torch.equal(many[::7], few)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs compute capability 9.0")
def test_a_graph_captures_it() -> None:
    x, w, _ = operands(300, 4096, 1024, torch.bfloat16, "cuda")
    out = torch.empty(300, 4096, dtype=torch.bfloat16, device="cuda")
    assert ordered_gemm.multiply(x, w, None, out, True)  # compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert ordered_gemm.multiply(x, w, None, out, True)
    x.copy_(x.flip(0))
    expected = torch.empty_like(out)
    assert ordered_gemm.multiply(x, w, None, expected, True)
    graph.replay()
    assert torch.equal(out, expected)
