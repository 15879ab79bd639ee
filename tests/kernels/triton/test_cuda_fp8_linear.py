"""Products of FP8 weights and activations use rounded activations, with the same bits for every number of rows.

Without a GPU the kernels run emulated.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spillover.kernels.cuda import fp8_linear as cuda
from spillover.kernels.cuda.driver.tensor_map import capable
from spillover.kernels.cuda.fp8_linear import (
    Cut,
    FewCut,
    KernelConfig,
    Rounding,
    Shape,
    add_norm_fp8_linear,
    fp8_linear,
)
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats.base import Linear, Target, WeightFormat
from spillover.kernels.formats.choice import Dequantized
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import Fp8Block, dequantize
from spillover.kernels.formats.fp8_cuda import Fp8Cuda
from spillover.kernels.formats.fp8_rows import Fp8Rows
from spillover.kernels.linear import linear
from spillover.kernels.triton import norm as triton_norm
from spillover.kernels.triton.norm import add_rms_norm
from spillover.models.weight_specs import Source, WeightSpec, kept_on
from support.kernels.emulated_cuda import EmulatedModule, described

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def _emulated(cut: Cut | FewCut | Rounding, config: KernelConfig, dtype: torch.dtype,
              device: torch.device) -> EmulatedModule:
    return EmulatedModule(cut.source, cut.options(config, dtype), late=True)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(cuda, "kernels", _emulated)
            patch.setattr(cuda, "tensor_map", described)
        yield


def made(seed: int, channels: int, inner: int, blocked: bool) -> tuple[Tensor, Tensor]:
    """Return random values and scales."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(channels, inner, generator=random).mul_(20).to(torch.float8_e4m3fn)
    shape = (-(-channels // 128), inner // 128) if blocked else (channels,)
    return values.to(DEVICE), (0.001 + 0.002 * torch.rand(shape, generator=random)).to(DEVICE)


def inputs(seed: int, rows: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=random) * 3 + 0.1
    return (torch.randn(rows, inner, generator=random) * spread).to(dtype).to(DEVICE)


def rounded(x: Tensor, blocked: bool, input_scale: Tensor | None = None) -> Tensor:
    """Return the values to which activations are rounded, in float64."""
    wide = x.float().unflatten(1, (-1, 128)) if blocked else x.float()
    if input_scale is None:
        largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        inverse, scale = torch.full_like(largest, 448) / largest, largest / 448  # `448 /` would round twice
    else:
        inverse, scale = 1 / input_scale, input_scale
    codes = (wide * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).reshape(x.shape)


def weight(values: Tensor, scales: Tensor) -> Tensor:
    if scales.dim() == 2:
        return dequantize(values, scales, torch.float64)
    return values.double() * scales[:, None].double()


def assert_near(found: Tensor, x: Tensor, exact: Tensor, bias: Tensor | None = None) -> None:
    expected = x @ exact.T + (0 if bias is None else bias.double())
    magnitude = x.abs() @ exact.abs().T
    step = 2.0 ** (-8 if found.dtype is torch.bfloat16 else -11)  # half the spacing of numbers of the result type
    # A GPU's tensor cores add e4m3 products with about 14 bits.
    bound = step * expected.abs() + (2e-6 if DEVICE.type == "cpu" else 1e-3) * magnitude
    assert ((found.double() - expected).abs() <= bound).all()


# 70 rows at once, in the tiles for prompts; then fewer rows, in the tiles for few rows.
@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
def test_a_row_has_the_same_bits_at_every_number_of_rows(blocked: bool) -> None:
    inner = 9 * 128  # three chunks of three steps, and an empty one
    values, scales = made(1, 192, inner, blocked)
    x = inputs(2, 70, inner)
    whole = fp8_linear(x, values, scales, cut=Cut(64))
    assert_near(whole, rounded(x, blocked), weight(values, scales))
    for rows, cut in ((1, FewCut(8, 1, True, True, 3)), (3, FewCut(8, 1, False, True, 2)), (8, None),
                      (20, FewCut(32, 2)), (20, FewCut(32, 2, True, resident=2)), (40, FewCut(64, 1, True, resident=3)),
                      (40, FewCut(64, 2)), (40, FewCut(64, 2, True, resident=2)), (40, FewCut(64, 2, resident=2)),
                      (40, Cut(136, 1)), (70, Cut(40, 1)), (70, None)):
        first = 70 - rows
        assert torch.equal(fp8_linear(x[first:], values, scales, cut=cut), whole[first:]), (rows, cut)


@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(("rows", "cut"), [
    (3, FewCut(8, 1, True, True, 3)), (40, FewCut(64, 2)), (40, Cut(64)), (40, Cut(224, 1))])
def test_a_gate_is_applied_to_rounded_products(rows: int, cut: Cut | FewCut, blocked: bool) -> None:
    values, scales = made(3, 256, 1024, blocked)
    x, bias = inputs(4, rows, 1024, torch.float16), inputs(5, 1, 256, torch.float16)[0]
    both = fp8_linear(x, values, scales, bias)
    assert_near(both, rounded(x, blocked), weight(values, scales), bias)
    gate, up = both.float().chunk(2, 1)
    silu = torch.nn.functional.silu(gate).half().float()
    torch.testing.assert_close(fp8_linear(x, values, scales, bias, gated=True, cut=cut), (silu * up).half(),
                               rtol=2**-9, atol=1e-6)


def test_activations_may_have_a_given_scale() -> None:
    values, scales = made(6, 64, 1024, False)
    x, given = inputs(7, 18, 1024), torch.tensor([0.004], device=DEVICE)  # numbers beyond its range are clipped
    out = fp8_linear(x, values, scales, input_scale=given)
    assert_near(out, rounded(x, False, given), weight(values, scales))
    for rows in (1, 9):
        assert torch.equal(fp8_linear(x[:rows], values, scales, input_scale=given), out[:rows])


@pytest.mark.parametrize("inner", [128, 384])
def test_matrices_of_few_inputs_have_one_chunk(inner: int) -> None:
    values, scales = made(8, 128, inner, True)
    x = inputs(9, 33, inner)
    out = fp8_linear(x, values, scales)
    assert_near(out, rounded(x, True), weight(values, scales))
    assert torch.equal(fp8_linear(x[:2], values, scales), out[:2])


EPS = 1e-5
SPREAD, WHOLE = FewCut(8, 1, True, True, 3), FewCut(8, 1, False, True, 2)


def added_and_normed(x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the separate kernel, or its definition where Triton's interpreter does not round to nearest."""
    if DEVICE.type == "cuda" or x.dtype is torch.float16:
        return add_rms_norm(x, residual, norm, EPS)
    total = (x.float() + residual.float()).to(x.dtype)
    sums = torch.nn.functional.pad(total.float().square(), (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]))
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    factor = 1 / (sums / x.shape[1] + EPS).sqrt()
    return (total * factor).to(x.dtype) * norm, total


# With 1664 or 2176 inputs some threads hold one vector more than others.
@pytest.mark.parametrize("case", ["rows", "static", "blocks"])
@pytest.mark.parametrize(("inner", "rows", "cut", "gated", "dtype"), [
    (128, 1, None, False, torch.bfloat16), (384, 2, WHOLE, False, torch.float16),
    (640, 1, None, True, torch.bfloat16), (1152, 2, WHOLE, True, torch.bfloat16),
    (1664, 1, WHOLE, False, torch.float16), (1664, 3, WHOLE, True, torch.bfloat16),
    (2048, 1, WHOLE, False, torch.bfloat16), (2176, 2, WHOLE, False, torch.bfloat16),
    # in a separate kernel before the product, with the rounding
    (128, 5, None, False, torch.bfloat16), (1152, 17, None, True, torch.bfloat16),
    (1664, 9, None, False, torch.float16), (4224, 3, None, True, torch.bfloat16),
    (8192, 4, None, False, torch.bfloat16), (384, 70, None, True, torch.float16),
])
def test_a_norm_in_the_product_after_it(case: str, inner: int, rows: int, cut: FewCut | None, gated: bool,
                                        dtype: torch.dtype) -> None:
    values, scales = made(20, 128, inner, case == "blocks")
    x, residual = inputs(21, rows, inner, dtype), inputs(22, rows, 2 * inner, dtype)[:, inner:]
    norm, bias = inputs(23, 1, inner, dtype)[0], inputs(24, 1, 128, dtype)[0]
    given = torch.tensor([0.01], device=DEVICE) if case == "static" else None
    both = add_norm_fp8_linear(x, residual, norm, EPS, values, scales, bias, gated, given, cut=cut)
    assert both is not None
    normed, total = added_and_normed(x, residual, norm)
    assert torch.equal(both[1], total)
    assert torch.equal(both[0], fp8_linear(normed, values, scales, bias, gated, given, cut=cut))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu" or not capable(DEVICE), reason="needs compute capability 9.0")
@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(("channels", "inner", "gated"), [
    (6144, 4096, False), (28672, 4096, True), (7168, 5120, False), (4096, 2560, False), (10240, 8192, True)])
def test_bits_of_a_norm_on_a_card(channels: int, inner: int, gated: bool, blocked: bool) -> None:
    values, scales = made(25, channels, inner, blocked)
    for rows in (1, 2, 3, 64, 300, 5000):
        x, residual, norm = inputs(26, rows, inner), inputs(27, rows, inner), inputs(28, 1, inner)[0]
        cut = WHOLE if rows <= 1 + blocked else None
        both = add_norm_fp8_linear(x, residual, norm, EPS, values, scales, gated=gated, early=True, cut=cut)
        assert both is not None
        normed, total = add_rms_norm(x, residual, norm, EPS)
        assert torch.equal(both[1], total)
        assert torch.equal(both[0], fp8_linear(normed, values, scales, gated=gated))


@pytest.mark.parametrize("base", [Fp8Rows(), Fp8Block()], ids=["rows", "blocks"])
def test_a_linear_norms_rows_itself(base: Fp8Rows | Fp8Block, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LinearShape((128, 128), 384)
    w = Linear(Fp8Cuda(base), shape, made(30, 256, 384, isinstance(base, Fp8Block)))
    norm, launched = inputs(31, 1, 384, torch.float16)[0], []
    monkeypatch.setattr(triton_norm, "add_rms_norm", lambda *of, **how: (launched.append(len(of[0])),
                                                                        add_rms_norm(*of, **how))[1])
    for gated in (False, True):
        for rows in (0, 1, 2, 3, 9):
            x, residual = inputs(32, rows, 384, torch.float16), inputs(33, rows, 384, torch.float16)
            found, total = w.format.add_norm_linear(x, residual, norm, EPS, w, gated=gated)
            expected = WeightFormat.add_norm_linear(w.format, x, residual, norm, EPS, w, gated=gated)
            assert torch.equal(total, expected[1])
            assert torch.equal(found, expected[0])
            assert launched == [rows] * (1 if rows else 2)
            launched.clear()
    apart = inputs(34, 1, 385, torch.float16)[:, 1:]  # starts between vectors
    w.format.add_norm_linear(apart, inputs(33, 1, 384, torch.float16), norm, EPS, w)
    assert launched == [1]


def test_wide_rows_and_those_of_clusters_are_normed_by_a_kernel_of_its_own() -> None:
    x, norm = inputs(35, 3, 8320), inputs(36, 1, 8320)[0]
    assert add_norm_fp8_linear(x, x, norm, EPS, *made(37, 64, 8320, True)) is None
    x, norm = inputs(35, 1, 1024), inputs(36, 1, 1024)[0]
    assert add_norm_fp8_linear(x, x, norm, EPS, *made(37, 64, 1024, True), cut=SPREAD) is None


def test_products_of_clusters_and_wide_rows_have_them_normed_ahead() -> None:
    for blocked in (False, True):
        for channels, inner, norms in ((6144, 4096, False), (28672, 4096, True), (57344, 8192, True),
                                       (57344, 8320, False), (4096, 14336, False)):
            shape = Shape(channels, inner, blocked, normed=True)
            assert cuda.choose_cut(1, shape, 132).norms(shape) is norms
            assert not cuda.choose_cut(3, shape, 132).norms(shape)


LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


def test_every_cut_fits_an_h200() -> None:
    for channels, inner in [*LLAMA, (64, 128), (16384, 53248)]:
        for blocked, gated in ((False, False), (True, False), (False, True), (True, True)):
            shape = Shape(channels, inner, blocked, gated, normed=inner <= 8192)
            for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 100, 128, 200, 256, 8192):
                cut = cuda.choose_cut(rows, shape, 132)
                stages = cut.stages(shape, cut.blocks(rows, shape, 132), 132)
                assert stages >= min(3, shape.chunk), (shape, rows, cut)
                assert cut.shared(shape, stages) + 1024 <= 227 << 10
                together = getattr(cut, "resident", 1)
                assert together * (cut.shared(shape, stages) + 1024) <= 228 << 10


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_it_compiles_for_an_h200_without_spilled_registers(tmp_path: Path) -> None:
    """No registers are spilled; kernels that reallocate registers start with the expected number."""
    for cut, blocked, normed in ((Cut(128), True, 0), (Cut(224), False, 0), (SPREAD, False, 0), (WHOLE, True, 8192),
                                 (WHOLE, False, 8192), (FewCut(64, 2), True, 0), (Rounding(8192), False, 8192),
                                 (Rounding(14336), True, 0), (Rounding(4096), True, 4096),
                                 (Rounding(4096), False, 4096), (FewCut(64, 1, True, resident=3), False, 0),
                                 (FewCut(64, 2, True, resident=2), True, 0), (FewCut(64, 2, resident=2), False, 0),
                                 (FewCut(32, 2, resident=2), True, 0)):
        done = subprocess.run(
            ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v",
             *cut.options(KernelConfig(blocked, False, 4, normed), torch.bfloat16),
             f"-I{cut.source.parent / 'include'}",
             cut.source, "-o", tmp_path / "kernel.cubin"],
            check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(" 0 bytes spill stores") == 1, done.stderr
        assert "serialized" not in done.stderr, done.stderr  # products that wait for one another
        assert not isinstance(cut, Cut) or "Used 168 registers" in done.stderr, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu" or not capable(DEVICE), reason="needs compute capability 9.0")
@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(("channels", "inner"), LLAMA)
def test_bits_on_a_card(channels: int, inner: int, blocked: bool) -> None:
    values, scales = made(10, channels, inner, blocked)
    x = inputs(11, 300, inner)
    whole = fp8_linear(x, values, scales)
    assert_near(whole, rounded(x, blocked), weight(values, scales))
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256):
        assert torch.equal(fp8_linear(x[300 - rows:], values, scales, early=True), whole[300 - rows:]), rows


class _Reader:
    """A reader of a checkpoint with the tensors of one linear."""

    def __init__(self, tensors: dict[str, Tensor], matrices: list[tuple[str, int]]) -> None:
        self.tensors, self.matrices = tensors, matrices

    def has(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, tensor: Field) -> Tensor:
        return self.tensors[tensor.name].reshape(tensor.shape)


@pytest.mark.parametrize("case", ["rows", "static", "blocks"])
def test_a_linear_is_multiplied_as_its_checkpoint_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"rows": Fp8Rows(), "static": Fp8Rows(False, "static"), "blocks": Fp8Block()}[case]
    shape, blocked = LinearShape((128, 128), 1024), case == "blocks"
    form = Dequantized(DENSE, base).on_cuda(shape)
    assert isinstance(form, Fp8Cuda)
    tensors: dict[str, Tensor] = {}
    for index in range(2):
        values, scales = made(12 + index, 128, 1024, blocked)
        tensors |= {f"{index}.weight": values, f"{index}.input_scale": torch.tensor(0.01 + 0.01 * index),
                    f"{index}.weight_scale{'_inv' if blocked else ''}": scales[:1] if case == "static" else scales}
    reader = _Reader(tensors, [("0.weight", 128), ("1.weight", 128)])
    w = Linear(form, shape, form.load(reader, shape, Target("bfloat16", DEVICE)))  # type: ignore[arg-type]
    assert [(field.dtype, field.shape) for field in form.fields(shape, "bfloat16")] == [
        (str(tensor.dtype).removeprefix("torch."), tensor.shape) for tensor in w.tensors]
    x = inputs(14, 5, 1024)
    given = torch.tensor([0.02], device=DEVICE) if case == "static" else None
    assert_near(linear(x, w), rounded(x, blocked, given), form.dequantize(w, torch.float64))
    if case == "rows":
        assert form.linear_silu(x, w).shape == (5, 128)
        monkeypatch.setattr(cuda, "kernels", lambda *of: None)
        x = x.half()  # without kernels activations are not rounded
        assert_near(linear(x, w), x.double(), form.dequantize(w, torch.float16).double())


def test_a_cuda_device_keeps_fp8_of_what_fits() -> None:
    def kept(form: WeightFormat, rows: tuple[int, ...], columns: int, fixed: bool = True) -> WeightSpec:
        spec = WeightSpec("o", (sum(rows), columns), (Source(("o",) * len(rows), rows),), Dequantized(DENSE, form))
        return kept_on({"layers.0": [spec]}, "cuda", "bfloat16", fixed)["layers.0"][0]

    for fixed in (True, False):
        whole = kept(Fp8Rows(), (64, 128), 512, fixed)
        assert isinstance(whole.format, Fp8Cuda)
        assert whole.nbytes("bfloat16") == 192 * 512 + 192 * 4
    assert isinstance(kept(Fp8Block(), (128, 64), 512).format, Fp8Cuda)
    for form, rows, columns in ((Fp8Rows(), (96,), 512), (Fp8Rows(), (64,), 448), (Fp8Block(), (64, 128), 512),
                                (Fp8Rows(activations="none"), (64,), 512)):
        assert kept(form, rows, columns).nbytes("bfloat16") == 2 * sum(rows) * columns, (form, rows)
