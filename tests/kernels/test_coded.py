"""Products with weights in their file's codes: as near as float32 brings them, the same bits however they are made."""

from __future__ import annotations

import subprocess
import sys

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
from spillover.kernels.formats.gguf_codes import Codes, GgufCodes, pack_codes, unpack_codes
from spillover.kernels.linear import embedding, embedding_reference, linear
from spillover.models.gguf.gguf_codes import code_bits, codes_of
from support.coded_weights import KINDS, coded, room, stored

needs_codes = pytest.mark.skipif(not native.multiplies_codes(), reason="this CPU does not multiply codes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (33, 64), (100, 96), (4200, 32)])
def test_packing_loses_nothing(kind: Kind, rows: int, columns: int) -> None:
    raw = stored(kind, rows, columns)
    weight = pack_codes([codes_of(raw, kind)])
    assert weight.shape == LinearShape((rows,), columns)
    assert weight.format == GgufCodes(code_bits(kind))
    assert np.array_equal(unpack_codes(weight).numpy(), gguf.dequantize(raw, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_below_each_other_are_one(kind: Kind) -> None:
    parts = [stored(kind, rows, 64, seed=rows) for rows in (40, 7, 64)]
    whole = pack_codes([codes_of(part, kind) for part in parts])
    assert np.array_equal(unpack_codes(whole).numpy(), np.concatenate([gguf.dequantize(p, kind) for p in parts]))


@needs_codes
@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(KINDS), rows=st.integers(1, 70), n=st.integers(1, 150), blocks=st.integers(1, 20),
       bias=st.booleans(), spread=st.integers(0, 20), seed=st.integers(0, 999))
def test_a_coded_product_is_as_near_as_float32(kind: Kind, rows: int, n: int, blocks: int, bias: bool, spread: int,
                                               seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = coded(kind, n, blocks * CODE_BLOCK, seed)
    # Columns of very different sizes, as activations have them.
    sizes = torch.exp2(torch.randint(-spread, spread + 1, (blocks * CODE_BLOCK,), generator=generator))
    x = torch.randn(rows, blocks * CODE_BLOCK, generator=generator) * sizes
    offset = torch.randn(n, generator=generator) if bias else None
    exact = x.double() @ unpack_codes(weight).double().T
    found = linear(x, weight, offset)
    error = (found.double() - exact - (0 if offset is None else offset.double())).abs()
    assert (error <= room(x, unpack_codes(weight)) + 1e-6 * found.abs()).all()


@needs_codes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (70, 32), (40, 96), (576, 1536), (961, 576)])
def test_a_row_has_the_same_bits_in_every_batch(kind: Kind, n: int, k: int) -> None:
    x = torch.randn(300, k) * torch.exp2(torch.randint(-10, 10, (k,)))
    weight, offset = coded(kind, n, k), torch.randn(n)
    alone = torch.cat([linear(x[i : i + 1], weight, offset) for i in range(40)])
    for rows in (*range(2, 41), 64, 100, 127, 128, 129, 300):
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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 40])
def test_odd_numbers_stay_in_their_row(kind: Kind, rows: int) -> None:
    weight = coded(kind, 64, 64)
    x = torch.randn(rows, 64)
    expected = linear(x[1:], weight)
    for value in (float("nan"), float("inf"), -float("inf")):
        x[0, 5] = value
        found = linear(x, weight)
        assert not found[0].isfinite().any()
        assert torch.equal(found[1:], expected)
    for size in (0.0, 1e-38, 1e-30, 1e30):  # of which the smallest come to nothing
        x[0] = size
        exact = x[0].double() @ unpack_codes(weight).double().T
        assert (linear(x, weight)[0].double() - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-33


@needs_codes
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_looks_rows_up(kind: Kind) -> None:
    weight = coded(kind, 100, 96)
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
        same = Codes(torch.full((32, 64), value, dtype=torch.uint8), torch.ones(32, 2, dtype=torch.float16),
                     torch.zeros(32, 2, dtype=torch.float16))
        x = torch.arange(-32.0, 32).repeat(20, 1)
        assert torch.equal(linear(x, pack_codes([same])), torch.full((20, 32), -32.0 * value))


def test_without_native_kernels_codes_are_not_kept() -> None:
    code = "from spillover.kernels import native; print(native.multiplies_codes())"
    environment = {"SPILLOVER_NATIVE": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"
