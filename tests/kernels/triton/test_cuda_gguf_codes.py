"""GGUF weights stay in codes on a CUDA device: the same numbers, and products with them.

Without a GPU the kernels run emulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from spillover.kernels.cuda import coded_linear as cuda
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear, Target
from spillover.kernels.formats.coded_cuda import GgufCuda, tile_form
from spillover.kernels.formats.gguf_codes import CODE_FORMS, Codes
from spillover.kernels.linear import embedding, linear
from spillover.models.gguf.gguf_codes import codes_of
from support.kernels.coded_kernels import DEVICE, coded_kernels
from support.models.coded_weights import KINDS, stored

COLUMNS = 768  # two chunks, the second of them not full; whole blocks of 256


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    with coded_kernels():
        yield


class File:
    """A reader of matrices stored in codes."""

    def __init__(self, kinds: list[Kind], rows: list[int], columns: int = COLUMNS) -> None:
        self.matrices = [(str(index), size) for index, size in enumerate(rows)]
        self.kinds = kinds
        listed = zip(kinds, rows, range(len(rows)), strict=True)
        self.stored = [stored(kind, size, columns, seed) for kind, size, seed in listed]
        self.shape = LinearShape(tuple(rows), columns)

    def read_codes(self, name: str) -> Codes:
        return codes_of(self.stored[int(name)], self.kinds[int(name)])

    def exact(self) -> Tensor:
        """Return the numbers according to the gguf package."""
        return torch.from_numpy(np.concatenate([gguf.dequantize(raw, kind) for raw, kind
                                                in zip(self.stored, self.kinds, strict=True)])).to(DEVICE)

    def load(self) -> Linear:
        form = GgufCuda(tuple(CODE_FORMS[kind.name] for kind in self.kinds))
        assert GgufCuda.serves(form.forms, self.shape)
        tensors = form.load(self, self.shape, Target("bfloat16", DEVICE))  # type: ignore[arg-type]
        assert [(field.dtype, field.shape) for field in form.fields(self.shape, "bfloat16")] == [
            (str(tensor.dtype).removeprefix("torch."), tensor.shape) for tensor in tensors]
        return Linear(form, self.shape, tensors)


def assert_near(found: Tensor, x: Tensor, exact: Tensor, bias: Tensor | None = None) -> None:
    expected = x.double() @ exact.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ exact.double().abs().T
    assert ((found.double() - expected).abs() <= 2.0**-8 * expected.abs() + 4e-6 * magnitude + 1e-30).all()


def inputs(rows: int, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tiles_hold_what_the_gguf_package_reads(kind: Kind) -> None:
    """Tiles equal the gguf package's numbers bit by bit; a gate and its factor are stored in pairs of channels."""
    for rows in ([48], [32, 16, 16], [16, 16]):
        file = File([kind] * len(rows), rows)
        kept = file.load()
        assert kept.format.parts(file.shape)[0].halves == (len(rows) == 2)  # type: ignore[attr-defined]
        assert torch.equal(kept.format.dequantize(kept, torch.float32), file.exact())


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_at_every_number_of_rows(kind: Kind) -> None:
    file, x = File([kind], [48]), inputs(130)
    kept = file.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "choose_cut", lambda *of: cuda.ManyCut(16, 2, 1))  # for the same number of rows
        whole = linear(x, kept)
    assert_near(whole, x, file.exact())
    for rows in (1, 5, 9, 20, 33, 130):
        assert torch.equal(linear(x[130 - rows :], kept), whole[130 - rows :]), rows


def test_types_that_are_fused_are_parts_of_their_own() -> None:
    """Fused matrices of different types become separate parts, as with q, k and v of a Q4_K_M file."""
    file = File([Kind.Q4_K, Kind.Q4_K, Kind.Q6_K], [48, 16, 16])
    kept, x, bias = file.load(), inputs(5), inputs(1, 80)[0]
    assert [part.rows for part in kept.format.parts(file.shape)] == [64, 16]  # type: ignore[attr-defined]
    assert torch.equal(kept.format.dequantize(kept, torch.float32), file.exact())
    found = linear(x, kept, bias)
    assert_near(found, x, file.exact(), bias)
    assert torch.equal(linear(x[4:], kept, bias), found[4:])


@pytest.mark.parametrize("kinds", [[Kind.Q4_K, Kind.Q4_K], [Kind.Q4_K, Kind.Q6_K]], ids=["pairs", "two parts"])
def test_a_gate_is_applied_to_rounded_products(kinds: list[Kind]) -> None:
    kept, x = File(kinds, [16, 16]).load(), inputs(3) / 64
    gate, up = linear(x, kept).float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate).bfloat16().float() * up
    # Triton's interpreter does not round to the nearest bfloat16.
    torch.testing.assert_close(kept.format.linear_silu(x, kept).float(), expected, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("there", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_an_embedding_looks_rows_up(kind: Kind, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File([kind], [80])
    kept, ids = file.load(), torch.tensor([79, 0, 17, 17, 33, 64, 48], device=DEVICE)
    if not there:
        monkeypatch.setattr(cuda, "kernels", lambda *of: None)
        monkeypatch.setattr("spillover.kernels.formats.coded_cuda.WEIGHTS_AT_ONCE", 16 * COLUMNS * 3)  # in three steps
    found, exact = embedding(ids, kept, torch.bfloat16), file.exact()[ids]
    assert found.dtype is torch.bfloat16
    if kind is Kind.Q6_K or not there:
        assert torch.equal(found, exact.bfloat16())
    else:  # offsets are relative to the middle of the codes, in float32
        torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-6 * float(exact.abs().max()))
    assert embedding(ids[:0], kept, torch.bfloat16).shape == (0, COLUMNS)


def test_a_type_takes_so_many_bytes() -> None:
    """Each type takes the expected bits per weight, in a tile of 16 by 128."""
    taken = {name: tile_form(form).tile_bytes * 8 / 2048 for name, form in CODE_FORMS.items()}
    assert taken == {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5, "Q4_K": 4.75, "Q5_K": 8.75,
                     "Q6_K": 8.625, "IQ4_NL": 8.5, "MXFP4": 8.5}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_cut_fits_into_shared_memory(kind: Kind) -> None:
    form, most = tile_form(CODE_FORMS[kind.name]), 226 << 10
    assert form.tile_bytes % 16 == 0
    for few in cuda.FEW_CUTS:
        assert few.shared(form, few.rows, 2) <= most
    for many in cuda.MANY_CUTS:
        if many.serves(form):
            assert many.shared(form, many.stages(form)) <= most
    assert cuda.ManyCut(16, 2, 1).serves(form)


def test_what_is_not_of_whole_tiles_is_not_served() -> None:
    forms = (CODE_FORMS["Q8_0"], CODE_FORMS["Q4_0"])
    assert GgufCuda.serves(forms, LinearShape((32, 16), 384))
    assert not GgufCuda.serves(forms, LinearShape((24, 24), 384))  # each matrix is a separate part
    assert GgufCuda.serves(forms[:1] * 2, LinearShape((24, 24), 384))
    assert not GgufCuda.serves(forms, LinearShape((32, 16), 320))
