"""Products with weights in codes are close to the exact ones, and a row has the same bits for every number of rows.

Without a GPU the kernels run emulated.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.cuda.coded_linear import Codes, TileForm, coded_linear, pack, unpack
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.batch_invariant import BatchInvariant
from spillover.kernels.formats.coded_cuda import CodedCuda
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.linear import linear
from spillover.models.weight_specs import Source, WeightSpec, kept_on, prepare_products
from support.kernels.coded_kernels import DEVICE, coded_kernels


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    with coded_kernels():
        yield


def made(seed: int, channels: int, inner: int, group: int, bits: int, kind: str, zeros: bool = False) -> Codes:
    random = torch.Generator().manual_seed(seed)
    groups = inner // group

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=random).to(DEVICE)

    def floats(*shape: int) -> Tensor:
        return (0.01 + 0.05 * torch.rand(shape, generator=random)).to(DEVICE)

    values = drawn(0, 1 << bits, channels, inner)
    if kind == "SUPER":
        larger = channels, inner // min(inner, 256)
        return Codes(values, drawn(0, 64, channels, groups), offsets=drawn(0, 64, channels, groups),
                     factors=((floats(*larger) / 32).half(), (-floats(*larger) / 8).half()))
    if kind == "PAIR":
        return Codes(values, floats(channels, groups).half(), offsets=-(floats(channels, groups) * 8).half())
    dtype = next(dtype for dtype, name in cuda.SCALES.items() if name == kind)
    return Codes(values, floats(channels, groups).to(dtype), drawn(0, 1 << bits, channels, groups) if zeros else None)


def weight(codes: Codes, bits: int) -> Tensor:
    """Return the decoded numbers, in float64."""
    def wide(part: Tensor) -> Tensor:
        return part.double().repeat_interleave(codes.values.shape[1] // part.shape[1], 1)

    scale, value = wide(codes.scales), codes.values.double()
    if codes.offsets is not None:
        offset = wide(codes.offsets)
        if codes.factors:
            scale, offset = scale * wide(codes.factors[0]), offset * wide(codes.factors[1])
        return scale * value + offset
    return scale * (value - (1 << (bits - 1) if codes.zeros is None else wide(codes.zeros)))


def multiplied(codes: Codes, bits: int, x: Tensor) -> Tensor:
    """Return the numbers that x is multiplied by: rounded to bfloat16 if kernels fold their scales."""
    exact = weight(codes, bits)
    return exact.bfloat16().double() if codes.form(bits).for_inputs(x.dtype).folded else exact


def inputs(seed: int, rows: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_near(found: Tensor, x: Tensor, exact: Tensor) -> None:
    expected = x.double() @ exact.T
    magnitude = x.double().abs() @ exact.abs().T
    step = 2.0 ** (-8 if x.dtype is torch.bfloat16 else -11)  # half the spacing of numbers of the result type
    assert ((found.double() - expected).abs() <= step * expected.abs() + 2e-6 * magnitude).all()


FORMS = [(4, 128, "HALF", True), (4, 32, "SUPER", False), (8, 384, "SINGLE", True), (4, 128, "BFLOAT", False),
         (4, 32, "BFLOAT", False)]
OTHERS = [(4, 32, "PAIR", False), (8, 32, "HALF", False), (4, 64, "BFLOAT", True)]


@pytest.mark.parametrize(("bits", "group", "kind", "zeros"), [*FORMS, *OTHERS], ids=str)
@pytest.mark.parametrize("halves", [False, True])
def test_tiles_hold_the_numbers_that_codes_mean(bits: int, group: int, kind: str, zeros: bool, halves: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PACKED", 16 * 384)  # in several pieces
    codes = made(0, 48, 384, group, bits, kind, zeros)
    form = codes.form(bits)
    tiles = pack(codes, form, halves)
    assert tiles.shape == form.tiles_shape(48, 384)
    torch.testing.assert_close(unpack(tiles, form, halves).double(), weight(codes, bits), rtol=1e-6, atol=1e-6)


# All numbers of rows at which another kernel, or another tile, is used.
@pytest.mark.parametrize(("bits", "group", "kind", "zeros"), FORMS, ids=str)
def test_a_row_has_the_same_bits_at_every_number_of_rows(bits: int, group: int, kind: str, zeros: bool) -> None:
    inner = 384  # two chunks, the second of them not full
    codes = made(1, 48, inner, group, bits, kind, zeros)
    form, x = codes.form(bits), inputs(2, 130, inner, torch.float16 if kind == "SUPER" else torch.bfloat16)
    tiles = pack(codes, form, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "choose_cut", lambda *of: cuda.MANY_CUTS[-3])  # for the same number of rows
        whole = coded_linear(x, tiles, form)
    assert_near(whole, x, multiplied(codes, bits, x))
    assert torch.equal(coded_linear(x, tiles, form), whole)
    for rows in (1, 5, 9, 20, 33):
        first = 130 - rows
        assert torch.equal(coded_linear(x[first:], tiles, form), whole[first:]), rows


def cut_name(cut: cuda.Cut | cuda.ManyCut) -> str:
    return f"{cut.kernel}_{cut.spread}" if isinstance(cut, cuda.ManyCut) else cut.kernel


@pytest.mark.parametrize("cut", [*cuda.FEW_CUTS, *cuda.MANY_CUTS], ids=cut_name)
def test_how_a_product_is_cut_makes_no_difference(cut: cuda.Cut | cuda.ManyCut) -> None:
    inner = 128 * 17  # five chunks, more rounds than stages, and the last has one step
    codes = made(3, 80, inner, 128, 4, "HALF", True)
    form, x = codes.form(4), inputs(4, 2, inner)
    tiles = pack(codes, form, False)
    expected = coded_linear(x, tiles, form)
    assert_near(expected, x, multiplied(codes, 4, x))
    least = cut.least_stages if isinstance(cut, cuda.ManyCut) else 2
    assert torch.equal(coded_linear(x, tiles, form, cut=cut, stages=least), expected)


@pytest.mark.parametrize(("kind", "rows", "cut"), [
    ("HALF", 1, cuda.FEW_CUTS[0]), ("SUPER", 1, cuda.FEW_CUTS[0]), ("PAIR", 5, cuda.FEW_CUTS[0]),
    ("HALF", 6, cuda.FEW_CUTS[1]), ("SUPER", 20, cuda.FEW_CUTS[3])], ids=str)
def test_a_block_multiplies_several_tiles(kind: str, rows: int, cut: cuda.Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = 128 * 10  # five chunks, so that teams have different numbers of steps
    codes = made(5, 112, inner, 128 if kind == "HALF" else 32, 4, kind, kind == "HALF")
    form, x = codes.form(4), inputs(6, rows, inner)
    tiles = pack(codes, form, False)

    def product(blocks: int) -> Tensor:
        monkeypatch.setattr(cuda, "_few_blocks", lambda *of: (2, min(blocks, of[4])))
        return coded_linear(x, tiles, form, cut=cut)

    expected = product(100)
    assert_near(expected, x, multiplied(codes, 4, x))
    for blocks in (1, 3):
        assert torch.equal(product(blocks), expected), blocks
    assert torch.equal(coded_linear(x[:1], tiles, form), expected[:1])  # one row, alone


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(FORMS), st.integers(1, 14), st.integers(1, 20), st.integers(17, 260),
       st.sampled_from(cuda.MANY_CUTS), st.integers(0, 3))
def test_more_rows_have_the_bits_of_few(kind: tuple[int, int, str, bool], strips: int, steps: int, rows: int,
                                        cut: cuda.ManyCut, more_stages: int) -> None:
    bits, group, scales, zeros = kind
    inner = -(-steps // 6) * 6 * 128 if group == 384 or scales == "SUPER" else steps * 128
    codes = made(rows, strips * 16, inner, group, bits, scales, zeros)
    form, x = codes.form(bits), inputs(steps, rows, inner, torch.float16 if scales == "SUPER" else torch.bfloat16)
    tiles = pack(codes, form, False)
    out = coded_linear(x, tiles, form, cut=cut,
                       stages=cut.least_stages + min(more_stages * cut.teams, cut.stages(form) - cut.least_stages))
    for first in {0, rows // 2, rows - 5}:
        assert torch.equal(coded_linear(x[first : first + 5], tiles, form), out[first : first + 5])


def test_more_rows_have_whole_clusters_and_room() -> None:
    form = TileForm(4, 1, "BFLOAT")
    for rows in (17, 32, 64, 65, 128, 256, 8192):
        for channels, inner in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (48, 128)):
            cut = cuda.choose_cut(rows, channels // 16, inner // 128, form, 132)
            assert isinstance(cut, cuda.ManyCut)
            assert cut in cuda.many_cuts(rows, inner // 128, form)
            assert cut.spread <= max(1, inner // 256)


@pytest.mark.parametrize("form", [TileForm(4, 1, "BFLOAT"), TileForm(4, 4, "SUPER"), TileForm(4, 4, "PAIR"),
                                  TileForm(8, 1, "SINGLE", True), TileForm(8, 4, "SINGLE", True)], ids=str)
def test_every_cut_fits_into_shared_memory(form: TileForm) -> None:
    most = 226 << 10
    for few in cuda.FEW_CUTS:
        assert few.shared(form, few.rows, 2) <= most
    for many in cuda.MANY_CUTS:
        assert many.serves(form)
        assert many.stages(form) % many.teams == 0
        assert many.shared(form, many.stages(form)) <= most


@pytest.mark.parametrize(("rows", "group", "kind", "dtype"), [
    (3, 128, "HALF", torch.bfloat16), (20, 128, "HALF", torch.bfloat16), (260, 128, "HALF", torch.bfloat16),
    (3, 32, "SUPER", torch.float16)])
def test_a_gate_is_applied_to_rounded_products(rows: int, group: int, kind: str, dtype: torch.dtype) -> None:
    codes = made(5, 64, 256, group, 4, kind, kind == "HALF")
    form, x = codes.form(4), inputs(6, rows, 256, dtype)
    bias = inputs(7, 1, 64, dtype)[0]
    tiles = pack(codes, form, True)
    both = coded_linear(x, tiles, form, bias, halves=True)
    assert_near(both, torch.cat((x, torch.ones_like(x[:, :1])), 1),
                torch.cat((weight(codes, 4), bias.double()[:, None]), 1))
    gate, up = both.float().chunk(2, 1)
    silu = torch.nn.functional.silu(gate).to(dtype).float()
    torch.testing.assert_close(coded_linear(x, tiles, form, bias, halves=True, gated=True), (silu * up).to(dtype),
                               rtol=2**-7 if dtype is torch.bfloat16 else 2**-10, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(4, 128), (4, 0), (8, 0)]), st.integers(1, 3), st.integers(1, 5), st.integers(1, 17),
       st.integers(0, 1 << 30))
def test_products_are_near_exact_ones(kind: tuple[int, int], strips: int, steps: int, rows: int, seed: int) -> None:
    bits, inner = kind[0], steps * 128
    group = kind[1] or inner
    codes = made(seed, strips * 16, inner, group, bits, "HALF" if bits == 4 else "SINGLE", True)
    form, x = codes.form(bits), inputs(seed, rows, inner)
    assert cuda.fits(strips * 16, inner, group)
    assert_near(coded_linear(x, pack(codes, form, False), form), x, multiplied(codes, bits, x))


KINDS = {"4 bits": GroupedInt(4, 128, "float16", zeros=True),
         "8 bits of a row": GroupedInt(8, 0, "float32", zeros=True),
         "ordered": GroupedInt(4, 128, "float16", zeros=True, ordered=True)}


def weight_in(base: GroupedInt, shape: LinearShape) -> tuple[Linear, Linear]:
    """Return a random weight, as stored in a checkpoint and as kept on a CUDA device."""
    random = torch.Generator(DEVICE).manual_seed(8)
    tensors = base.dummy(shape, 0, Target("bfloat16", DEVICE), random)
    if base.ordered:
        for order in tensors[-1]:
            order.copy_(torch.randperm(shape.in_features, generator=random, device=DEVICE))
    form = base.on_cuda(shape)
    assert isinstance(form, CodedCuda)
    return Linear(base, shape, tensors), Linear(form, shape, form.packed_tensors(shape, tensors))


@pytest.mark.parametrize("there", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_is_multiplied_as_its_checkpoint_says(kind: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LinearShape((32, 32), 384)
    stored, kept = weight_in(KINDS[kind], shape)
    assert [(field.dtype, field.shape) for field in kept.format.fields(shape, "bfloat16")] == [
        (str(tensor.dtype).removeprefix("torch."), tensor.shape) for tensor in kept.tensors]
    exact = stored.format.dequantize(stored, torch.float32)
    torch.testing.assert_close(kept.format.dequantize(kept, torch.float32), exact, rtol=1e-6, atol=1e-7)
    if not there:
        monkeypatch.setattr(cuda, "kernels", lambda *of: None)
        monkeypatch.setattr("spillover.kernels.formats.coded_cuda.WEIGHTS_AT_ONCE", 16 * 384 * 3)  # in two steps
        exact = exact.half()
    dtype = torch.bfloat16 if there else torch.float16
    x, bias = inputs(9, 20, 384, dtype), inputs(10, 1, 64, dtype)[0]
    out = linear(x, kept, bias)
    assert_near(out, torch.cat((x, torch.ones_like(x[:, :1])), 1),
                torch.cat((exact.double(), bias.double()[:, None]), 1))
    assert torch.equal(linear(x[19:], kept, bias), out[19:])
    gate, up = out.float().chunk(2, 1)
    silu = torch.nn.functional.silu(gate).to(dtype).float()
    # Triton's interpreter does not round to the nearest bfloat16.
    torch.testing.assert_close(kept.format.linear_silu(x, kept, bias), (silu * up).to(dtype), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("fixed", [True, False], ids=["batch-invariant", "fast"])
def test_a_cuda_device_keeps_tiles_of_what_fits(fixed: bool) -> None:
    def spec(rows: tuple[int, ...], columns: int) -> WeightSpec:
        return WeightSpec("o", (sum(rows), columns), (Source(("o",) * len(rows), rows),), GroupedInt(4, 128, "float16"))

    def kept(rows: tuple[int, ...], columns: int) -> WeightSpec:
        return kept_on({"layers.0": [spec(rows, columns)]}, "cuda", "bfloat16", fixed)["layers.0"][0]

    tiled = kept((64, 32), 512)
    assert isinstance(tiled.format, CodedCuda)
    assert tiled.nbytes("bfloat16") == 96 * 512 // 2 + 96 * 4 * 2
    for odd in (kept((24,), 512), kept((32,), 320)):
        assert odd.format == (BatchInvariant(GroupedInt(4, 128, "float16")) if fixed else GroupedInt(4, 128, "float16"))


def test_kernels_are_compiled_when_products_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(cuda, "kernels", lambda *of: asked.append(of))
    spec = WeightSpec("o", (32, 256), (Source(("o",), (32,)),), GroupedInt(4, 128, "float16"))
    prepare_products(kept_on({"layers.0": [spec]}, "cuda", "bfloat16", True), Target("bfloat16", DEVICE), 64)
    assert asked == [(TileForm(4, 1, "HALF"), torch.bfloat16, DEVICE)]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("form", [TileForm(8, 1, "BFLOAT", zeros=True), TileForm(8, 8, "SIGNED")], ids=["int8", "Q6_K"])
def test_products_of_many_rows_spill_no_registers(form: TileForm, tmp_path: Path) -> None:
    """No registers are spilled; four warpgroups with 8-bit codes need the most."""
    done = subprocess.run(
        ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", *form.options(torch.bfloat16),
         f"-I{cuda.SOURCE.parent / 'include'}", cuda.SOURCE, "-o", tmp_path / "kernel.cubin"],
        check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"Compiling entry function '(many_rows\w+)'.*\n.*\n.* (\d+) bytes spill stores", done.stderr)
    spilled = dict(found)
    assert len(spilled) == len({cut.kernel for cut in cuda.MANY_CUTS}), done.stderr
    assert set(spilled.values()) == {"0"}, spilled
    assert "serialized" not in done.stderr, done.stderr  # products that wait for one another
