"""Products with weights in a file's codes: accurate to float32 rounding, the same bits however they are computed."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.kernels import native
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.gguf_codes import CODE_FORMS, GgufCodes, grouped_codes, pack_codes, unpack_codes
from spillover.kernels.linear import embedding, embedding_reference, linear
from spillover.kernels.native import build
from spillover.models.gguf.gguf_codes import codes_of
from support.models.coded_weights import KINDS, NVFP4, coded, room, stored

FORMS: list[Kind | str] = [*KINDS, *NVFP4]
STEP = {kind: max(CODE_BLOCK, gguf.GGML_QUANT_SIZES[kind][0]) if isinstance(kind, Kind) else CODE_BLOCK
        for kind in FORMS}  # columns of a block
needs_codes = pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (33, 2), (100, 3), (4200, 1)])
def test_packing_loses_nothing(kind: Kind, rows: int, blocks: int) -> None:
    raw = stored(kind, rows, blocks * STEP[kind])
    weight = pack_codes([codes_of(raw, kind)])
    assert weight.shape == LinearShape((rows,), blocks * STEP[kind])
    assert weight.format == GgufCodes((CODE_FORMS[kind.name],))
    assert weight.tensors[0].shape == weight.format.fields(weight.shape, "float32")[0].shape
    assert np.array_equal(unpack_codes(weight).numpy(), gguf.dequantize(raw, kind))


def test_a_panel_takes_few_bytes_more_than_the_file() -> None:
    for kind in KINDS:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        assert CODE_FORMS[kind.name].panel_bytes(256) <= 1.06 * 32 * size * 256 // block, kind


@pytest.mark.parametrize("kind", KINDS)
def test_weights_below_each_other_are_one(kind: Kind) -> None:
    parts = [stored(kind, rows, STEP[kind], seed=rows) for rows in (40, 7, 64)]
    whole = pack_codes([codes_of(part, kind) for part in parts])
    assert np.array_equal(unpack_codes(whole).numpy(), np.concatenate([gguf.dequantize(p, kind) for p in parts]))


def test_weights_of_different_types_are_one_too() -> None:
    kinds = [Kind.Q4_K, Kind.Q4_K, Kind.Q6_K], [Kind.Q5_0, Kind.Q8_0, Kind.Q5_0], [Kind.MXFP4, Kind.Q4_1, Kind.IQ4_NL]
    for listed in kinds:
        parts = [stored(kind, rows, 256, seed=rows) for kind, rows in zip(listed, (40, 7, 33), strict=True)]
        codes = [codes_of(part, kind) for part, kind in zip(parts, listed, strict=True)]
        whole, each = pack_codes(codes), [pack_codes([one]) for one in codes]
        expected = np.concatenate([gguf.dequantize(part, kind) for part, kind in zip(parts, listed, strict=True)])
        assert np.array_equal(unpack_codes(whole).numpy(), expected)
        ids = torch.randperm(80)
        assert np.array_equal(whole.format.embedding_lookup(ids, whole).numpy(), expected[ids])
        if native.multiplies_codes():
            x, bias = torch.randn(3, 256), torch.randn(80)
            products = [linear(x, one, part) for one, part in zip(each, bias.split([40, 7, 33]), strict=True)]
            assert torch.equal(linear(x, whole, bias), torch.cat(products, 1))
            assert np.array_equal(embedding(ids, whole).numpy(), expected[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_s_scales_may_be_anything(kind: Kind) -> None:
    """Scales may be zero, subnormal or the largest number; MXFP4's may be any byte that gives finite numbers."""
    raw = stored(kind, 40, 512)
    if kind is Kind.MXFP4:
        raw.reshape(40, -1, 17)[..., 0] = np.arange(40 * 16).reshape(40, 16) % 252
    else:
        codes = codes_of(raw, kind)
        odd = torch.tensor([0.0, 6e-8, -6e-5, 65504.0, -65504.0], dtype=torch.float16)
        numbers = (codes.head or codes.block)[0]
        numbers.copy_(odd[torch.arange(numbers.numel()) % 5].view(numbers.shape))
        assert torch.equal(unpack_codes(pack_codes([codes])), codes.weight())
        return
    assert np.array_equal(unpack_codes(pack_codes([codes_of(raw, kind)])).numpy(), gguf.dequantize(raw, kind))


@needs_codes
@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([4, 8]), group=st.sampled_from([32, 64, 128, 0]), n=st.integers(1, 80),
       groups=st.integers(1, 4), rows=st.integers(1, 20), seed=st.integers(0, 999))
def test_groups_of_any_length_with_float32_scales(bits: int, group: int, n: int, groups: int, rows: int,
                                                  seed: int) -> None:
    """(code - zero) * scale, as in checkpoints, for any group length; group 0: one scale per row."""
    generator = torch.Generator().manual_seed(seed)
    columns = groups * (group or 96)
    codes = torch.randint(0, 1 << bits, (n, columns), generator=generator)
    zeros = torch.randint(0, 1 << bits, (n, groups if group else 1), generator=generator)
    scales = torch.randn(zeros.shape, generator=generator).to(torch.bfloat16).float()
    exact = (codes - zeros.repeat_interleave(columns // zeros.shape[1], 1)) * scales.repeat_interleave(
        columns // zeros.shape[1], 1)
    base = 0 if bits == 4 else 128
    weight = pack_codes([grouped_codes((codes - base).to(torch.uint8 if bits == 4 else torch.int8), scales,
                                       (base - zeros) * scales)])
    assert torch.equal(unpack_codes(weight), exact)
    ids = torch.arange(n)
    assert torch.equal(embedding(ids, weight), exact)
    x = torch.randn(rows, columns, generator=generator)
    found = linear(x, weight)
    spread = torch.full_like(exact, (1 << bits) * scales.abs().max())  # offsets may be larger than the weights
    assert ((found.double() - x.double() @ exact.double().T).abs() <= room(x, spread)).all()
    assert torch.equal(linear(x[:1], weight), found[:1])


@needs_codes
@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(FORMS), rows=st.integers(1, 70), n=st.integers(1, 150), blocks=st.integers(1, 20),
       bias=st.booleans(), spread=st.integers(0, 20), seed=st.integers(0, 999))
def test_a_coded_product_is_as_near_as_float32(kind: Kind | str, rows: int, n: int, blocks: int, bias: bool,
                                               spread: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = math.ceil(blocks * CODE_BLOCK / STEP[kind]) * STEP[kind]
    weight = coded(kind, n, columns, seed)
    # Columns of very different magnitudes, as in activations.
    sizes = torch.exp2(torch.randint(-spread, spread + 1, (columns,), generator=generator))
    x = torch.randn(rows, columns, generator=generator) * sizes
    offset = torch.randn(n, generator=generator) if bias else None
    exact = x.double() @ unpack_codes(weight).double().T
    found = linear(x, weight, offset)
    error = (found.double() - exact - (0 if offset is None else offset.double())).abs()
    assert (error <= room(x, unpack_codes(weight)) + 1e-6 * found.abs()).all()


@needs_codes
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (70, 32), (576, 1536), (961, 576)])
def test_a_row_has_the_same_bits_in_every_batch(kind: Kind | str, n: int, k: int) -> None:
    k = math.ceil(k / STEP[kind]) * STEP[kind]
    x = torch.randn(300, k) * torch.exp2(torch.randint(-10, 10, (k,)))
    weight, offset = coded(kind, n, k), torch.randn(n)
    alone = torch.cat([linear(x[i : i + 1], weight, offset) for i in range(40)])
    for rows in (*range(2, 12), 16, 17, 31, 32, 33, 40, 64, 127, 129, 300):
        together = linear(x[:rows], weight, offset)
        assert torch.equal(together[:40], alone[:rows]), f"{rows} rows"


@needs_codes
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_the_bits_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    x, weight = torch.randn(rows, 128), coded(Kind.Q4_1, 300, 128)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_codes
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("rows", [2, 40])
def test_odd_numbers_stay_in_their_row(kind: Kind | str, rows: int) -> None:
    weight = coded(kind, 64, STEP[kind])
    x = torch.randn(rows, STEP[kind])
    expected = linear(x[1:], weight)
    for value in (float("nan"), float("inf"), -float("inf")):
        x[0, 5] = value
        found = linear(x, weight)
        assert not found[0].isfinite().any()
        assert torch.equal(found[1:], expected)
    for size in (0.0, 1e-38, 1e-30, 1e30):  # results for the smallest underflow to 0
        x[0] = size
        exact = x[0].double() @ unpack_codes(weight).double().T
        assert (linear(x, weight)[0].double() - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-33


@needs_codes
@pytest.mark.parametrize("kind", FORMS)
def test_embedding_looks_rows_up(kind: Kind | str) -> None:
    weight = coded(kind, 100, 3 * STEP[kind])
    ids = torch.randint(0, 100, (50,))
    expected = unpack_codes(weight)[ids]
    assert torch.equal(embedding(ids, weight), expected)
    assert torch.equal(embedding_reference(ids, weight), expected)


@needs_codes
def test_strided_input_no_rows_and_a_wrong_width() -> None:
    weight, wide = coded(Kind.Q4_1, 40, 32), torch.randn(5, 64)
    assert torch.equal(linear(wide[:, ::2], weight), linear(wide[:, ::2].contiguous(), weight))
    assert linear(torch.empty(0, 32), weight).shape == (0, 40)
    with pytest.raises(ValueError, match="weight"):
        linear(torch.randn(2, 64), weight)


@needs_codes
def test_codes_that_are_all_alike_are_multiplied_exactly() -> None:
    for value in range(16):
        same = grouped_codes(torch.full((32, 64), value, dtype=torch.uint8), torch.ones(32, 2), torch.zeros(32, 2))
        x = torch.arange(-32.0, 32).repeat(20, 1)
        assert torch.equal(linear(x, pack_codes([same])), torch.full((20, 32), -32.0 * value))


def test_without_native_kernels_codes_are_not_kept() -> None:
    code = "from spillover.kernels import native; print(native.multiplies_codes())"
    environment = {"SPILLOVER_NATIVE": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


def built(sources: list[Path], cores: str) -> ctypes.CDLL:
    """Compile the sources for `cores`, unless they are in the cache."""
    command = [*build.command(cores), "-O1"]
    path = build.cache_folder() / build.library_name([*command, *(source.read_text() for source in sources)])
    if not path.exists():
        build.build([*command, f"-I{Path(build.__file__).parent}"], path, lambda done, total: None, sources)
    library = ctypes.CDLL(str(path))
    library.coded_linear.argtypes = native._PARAMETERS["coded_linear"]
    return library


@needs_codes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("other", ["emulated_tiles", "without VNNI"])
def test_other_instructions_of_x86_give_the_same_bits(other: str) -> None:
    folder, cores = Path(build.__file__).parent, {level.name: level.cores for level in build.LEVELS["x86_64"]}
    tiles = other == "emulated_tiles"
    source = Path(__file__).parents[1] / "support/kernels/emulated_tiles.cpp" if tiles else folder / "coded/coded.cpp"
    library = built([source, folder / "team.cpp"],
                    f"{cores['avx512-vnni']} -mavx512bf16" if tiles else cores["avx512"])
    weights = [coded(kind, 70, 512) for kind in FORMS]
    weights.append(pack_codes([grouped_codes(torch.randint(-128, 128, (70, 512)).to(torch.int8), torch.randn(70, 4),
                                             torch.randn(70, 4))]))
    for weight in weights:
        for rows in (1, 2, 3, 4, 17):
            x = torch.randn(rows, 512) * torch.exp2(torch.randint(-10, 10, (512,)))
            found = torch.empty(rows, 70)
            library.coded_linear(x.data_ptr(), weight.tensors[0].data_ptr(), None, found.data_ptr(), rows, 70, 512)
            assert torch.equal(found, linear(x, weight)), (weight.format, rows)
