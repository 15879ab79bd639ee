"""A product with packed weights equals torch's, and a row's bits do not depend on the other rows."""

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.kernels import native
from spillover.kernels.arena import Arena
from spillover.kernels.fields import Field, LinearShape
from spillover.kernels.formats import packed as packed_format
from spillover.kernels.formats.base import Target, TensorReader
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.packed import Packed, pack
from spillover.kernels.linear import embedding, embedding_reference, linear, linear_reference, unpack

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70), n=st.integers(1, 200), k=st.integers(1, 300), bias=st.booleans(), seed=st.integers(0, 99)
)
def test_packed_product_is_the_product(rows: int, n: int, k: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    offset = torch.randn(n, generator=generator) if bias else None
    packed = pack(weight)
    assert isinstance(packed.format, Packed)
    assert packed.shape == LinearShape((n,), k)
    torch.testing.assert_close(linear(x, packed, offset), linear_reference(x, weight, offset), rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize(("n", "k"), [(96, 64), (70, 33), (576, 1536), (960, 576)])
def test_a_row_has_the_same_bits_in_every_batch(n: int, k: int) -> None:
    x = torch.randn(300, k)
    packed = pack(torch.randn(n, k))
    alone = torch.cat([linear(x[i : i + 1], packed) for i in range(40)])
    for rows in (*range(2, 41), 64, 100, 255, 256, 300):
        together = linear(x[:rows], packed)
        assert torch.equal(together[:40], alone[:rows]), f"{rows} rows"


@needs_native
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, packed = torch.randn(150, 128), pack(torch.randn(40, 128))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(linear(x, packed))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


class Matrices:
    """A TensorReader of matrices in memory."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = {f"matrix {index}": tensor for index, tensor in enumerate(tensors)}
        self.matrices = [(name, len(tensor)) for name, tensor in self.tensors.items()]

    def read(self, tensor: Field) -> torch.Tensor:
        return self.tensors[tensor.name]


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.integers(1, 90), min_size=1, max_size=4), k=st.integers(1, 40), width=st.sampled_from([8, 16]),
       dtype=st.sampled_from([torch.bfloat16, torch.float32]), at_once=st.sampled_from([1, 5000, 1 << 20]))
def test_matrices_that_are_packed_as_they_come_are_those_that_are_packed_at_once(
        rows: list[int], k: int, width: int, dtype: torch.dtype, at_once: int) -> None:
    tensors = [torch.randn(count, k).to(dtype) for count in rows]
    form, shape = Packed(width), LinearShape((sum(rows),), k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_format, "BYTES_AT_ONCE", at_once)
        target = Target("float32", torch.device("cpu"), Arena())
        (panels,) = form.load(cast(TensorReader, Matrices(tensors)), shape, target)
    whole = torch.cat(tensors).float()
    padded = torch.zeros(-(-len(whole) // width) * width, k)
    padded[: len(whole)] = whole
    assert torch.equal(panels, padded.view(-1, width, k).transpose(1, 2))


@needs_native
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_packing_loses_nothing(n: int) -> None:
    weight = torch.randn(n, 24)
    packed = pack(weight)
    assert torch.equal(unpack(packed), weight)
    ids = torch.randint(0, n, (50,))
    assert torch.equal(embedding(ids, packed), weight[ids])
    assert torch.equal(embedding_reference(ids, packed), weight[ids])


@needs_native
def test_strided_input_and_no_rows() -> None:
    packed = pack(torch.randn(40, 16))
    wide = torch.randn(5, 32)
    assert torch.equal(linear(wide[:, ::2], packed), linear(wide[:, ::2].contiguous(), packed))
    assert linear(torch.empty(0, 16), packed).shape == (0, 40)


@needs_native
def test_a_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        linear(torch.randn(2, 8), pack(torch.randn(4, 16)))


def test_other_dtypes_stay_as_they_are() -> None:
    weight = torch.randn(8, 16, dtype=torch.bfloat16)
    packed = pack(weight)
    assert packed.format == DENSE
    assert packed.tensors[0] is weight
    assert linear(torch.randn(3, 16, dtype=torch.bfloat16), packed).dtype is torch.bfloat16
