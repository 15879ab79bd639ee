"""Products in CUDA C++ have the bits that their order of sums says, however they are cut.

Without a card the kernel runs emulated, which shows its schedule, its addresses and its order of sums; on a card it is
compared with the Triton kernel, to the bit.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spillover.kernels.cuda import ordered_gemm
from spillover.kernels.cuda.ordered_gemm import Cut
from spillover.kernels.extents import product_chunks
from support.emulated_gemm import EmulatedGemm, described

CUDA = torch.cuda.is_available() and torch.cuda.get_device_capability() == ordered_gemm.CAPABILITY
# A cut, and rows, channels, inner: the last tile, the last step and the last chunk are not full, or there is none.
CASES = [
    (Cut(64, 3), 150, 72, 200),
    (Cut(64, 2, 2, 1), 150, 72, 256),
    (Cut(64, 3, 1, 2), 150, 136, 200),
    (Cut(32, 2, 2, 2, band=2), 300, 136, 200),
    (Cut(32, 2, 2, 1, halves=2), 300, 40, 200),
    (Cut(32, 2, 2, 1), 150, 40, 1160),
    (Cut(64, 3, spread=True, resident=2), 130, 72, 1152),
    (Cut(96, 4, halves=2, spread=True), 130, 72, 1160),
]


def operands(rows: int, channels: int, inner: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, w, bias = (torch.randn(shape, generator=generator).to(dtype).to(device)
                  for shape in ((rows, inner), (channels, inner), (channels,)))
    return x, w, bias


def in_order(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the order's definition, each product added by itself."""
    chunks, chunk = product_chunks(w.shape[0], w.shape[1])
    total = torch.zeros(x.shape[0], w.shape[0])
    columns, rows = x.float().T.contiguous(), w.float().T.contiguous()
    for begin in range(0, chunks * chunk, chunk):
        sums = torch.zeros_like(total)
        for k in range(begin, min(begin + chunk, x.shape[1])):
            sums += columns[k][:, None] * rows[k][None]
        total += sums
    return (total if bias is None else total + bias.float()).to(x.dtype)


@pytest.mark.parametrize(("cut", "rows", "channels", "inner"), CASES)
def test_sums_have_the_order_of_the_matrix(cut: Cut, rows: int, channels: int, inner: int,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_gemm, "kernels", EmulatedGemm)
    monkeypatch.setattr(ordered_gemm, "_map", described)
    monkeypatch.setattr(ordered_gemm, "resident_clusters", lambda *_: 1)  # one after another
    dtype = torch.float16 if inner == 256 else torch.bfloat16
    x, w, bias = operands(rows, channels, inner, dtype, "cpu")
    given = bias if inner in (200, 1160) else None
    out = torch.full((rows, channels), torch.nan, dtype=dtype)
    assert ordered_gemm.multiply(x, w, given, out, cut, early=False)
    assert torch.equal(out, in_order(x, w, given))


def test_it_serves_only_what_it_can_and_says_so() -> None:
    x, w, _ = operands(20, 64, 128, torch.bfloat16, "cpu")
    out = torch.empty(20, 64, dtype=torch.bfloat16)
    assert not ordered_gemm.multiply(x, w, None, out, CASES[0][0], early=False)  # no card
    assert not ordered_gemm.multiply(x.float(), w.float(), None, out.float(), CASES[0][0], early=False)
    assert not ordered_gemm.multiply(x, w[:63], None, out[:, :63].contiguous(), CASES[0][0], early=False)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_it_compiles_for_an_h200_without_spilled_registers(tmp_path: Path) -> None:
    for cut, chunks in ((Cut(192, 5, 2, 1), 4), (Cut(256, 4, 2, 1), 1), (Cut(192, 4, halves=2, spread=True), 4)):
        assert cut.shared <= 227 << 10
        options = cut.options(chunks, torch.bfloat16, True)
        done = subprocess.run(
            ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", *options, ordered_gemm.SOURCE,
             "-o", tmp_path / "kernel.cubin"], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert " 0 bytes spill stores" in done.stderr, done.stderr
        assert "serialized" not in done.stderr, done.stderr  # products that wait for one another


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cut", "rows", "channels", "inner"), [
    *CASES, (Cut(192, 5, 2, 1), 257, 1032, 1160), (Cut(128, 4, halves=2, spread=True), 513, 1096, 2880),
    (Cut(256, 4, 2, 1), 300, 16456, 1088),
])
def test_bits_are_those_of_the_triton_kernel(cut: Cut, rows: int, channels: int, inner: int,
                                             dtype: torch.dtype) -> None:
    from spillover.kernels.triton.ordered_linear import SQUARE, ordered_linear

    x, w, bias = operands(rows, channels, inner, dtype, "cuda")
    for given in (None, bias):
        out = torch.full((rows, channels), torch.nan, dtype=dtype, device="cuda")
        assert ordered_gemm.multiply(x, w, given, out, cut, early=True)
        assert torch.equal(out, ordered_linear(x, w, given, SQUARE))
