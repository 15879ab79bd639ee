"""Weights are packed by the native kernels exactly as torch packs them, whatever the form and the fused matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import code_layout, native
from spillover.kernels.code_layout import unpack_fields
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.gguf_codes import CODE_FORMS, CodeForm, Codes, grouped_form, pack_codes, unpack_codes

FORMS = [*CODE_FORMS.values(), grouped_form(4, 64), grouped_form(8, 128)]
COLUMNS = 512

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are off")


def in_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_layout.native, "library", lambda: None)


def made(form: CodeForm, rows: int, random: torch.Generator) -> Codes:
    """Return random codes, and numbers of any bits that are no NaN."""
    values = torch.randint(0, 1 << form.bits, (rows, COLUMNS), dtype=torch.uint8, generator=random)

    def numbers(kind: str, count: int) -> Tensor:
        return torch.randint(0, 100, (rows, count), generator=random).to(getattr(torch, kind))

    return Codes(form, values.view(torch.int8) if form.bits == 8 else values,
                 tuple(numbers(kind, COLUMNS // CODE_BLOCK) for kind in form.block),
                 tuple(numbers(kind, COLUMNS // form.unit) for kind in form.head))


@settings(deadline=None, max_examples=60)
@given(form=st.sampled_from(FORMS), sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_panels_are_those_of_torch(form: CodeForm, sizes: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = [made(form, rows, random) for rows in sizes]
    packed = pack_codes(parts)
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        assert torch.equal(packed.tensors[0], pack_codes(parts).tensors[0])
    assert torch.equal(unpack_codes(packed), torch.cat([part.weight() for part in parts]))


@settings(deadline=None, max_examples=60)
@given(field=st.sampled_from([(4, 16), (4, 32), (4, 64), (1, 1), (1, 32), (2, 32)]), rows=st.integers(1, 9),
       blocks=st.integers(1, 70), above=st.booleans(), seed=st.integers(0, 99))
def test_fields_are_those_of_torch(field: tuple[int, int], rows: int, blocks: int, above: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (rows, blocks, 150), dtype=torch.uint8, generator=random)[..., 13 : 13 + 128]
    low = torch.randint(0, 16, (rows, blocks, 128 * 8 // field[0]), dtype=torch.uint8, generator=random)
    given_above = above and field[0] < 4
    found = unpack_fields(stored, *field, low.clone() if given_above else None)
    assert given_above or found.max() < 1 << field[0]
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        assert torch.equal(found, unpack_fields(stored, *field, low.clone() if given_above else None))
