"""The device's mixture of experts computes the same as the plain one, by either path, in every weight format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spillover.kernels import extents
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.grouped_gemm import Tile
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import mixture_reference

pytest.importorskip("triton")
from spillover.kernels.triton.moe import moe as device
from spillover.kernels.triton.moe import moe_routing as routing
from spillover.kernels.triton.moe import moe_widen as widening
from support.kernels.mixtures import DEVICE, assert_near, case

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter truncates where the device rounds


def wide(experts: Experts) -> Experts:
    """Return the same values in float32."""
    bias = None if experts.bias is None else experts.bias.float()
    each = [experts.expert(index, torch.float32).float() for index in range(experts.count)]
    return Experts(Linear(DENSE, experts.weight.shape, (torch.stack(each),)), bias)


def batch_invariant(experts: Experts) -> Experts:
    weight = experts.weight
    return Experts(Linear(weight.format.batch_invariant(), weight.shape, weight.tensors), experts.bias)


@pytest.mark.parametrize("few_tokens", [0, 8])
@pytest.mark.parametrize(
    ("form", "hidden", "inner", "clamped", "dtype"),
    [
        ("dense", 64, 48, False, torch.float32),
        ("dense", 96, 40, True, torch.bfloat16),
        ("fp8", 160, 144, False, torch.bfloat16),
        ("fp8", 128, 128, False, torch.float32),
        ("mxfp4", 96, 160, True, torch.bfloat16),
        ("mxfp4", 128, 64, True, torch.float32),
        ("int4_32", 128, 256, False, torch.bfloat16),
        ("int4_128", 128, 128, True, torch.float32),
        ("int8_64", 256, 128, False, torch.float32),
        ("gguf_Q4_K", 256, 256, False, torch.bfloat16),
        ("gguf_Q5_1", 128, 128, False, torch.float32),
        ("gguf_Q6_K", 256, 256, False, torch.float32),
        ("gguf_Q6_K_and_Q4_K", 256, 256, False, torch.float32),
    ],
)
def test_both_paths_match_the_reference(
    form: str, hidden: int, inner: int, clamped: bool, dtype: torch.dtype, few_tokens: int
) -> None:
    tokens, experts, k = 3, 4, 2
    x, scores, first, second = case(form, tokens, hidden, inner, experts, dtype, clamped)
    limit = 1.5 if clamped else None
    exact = mixture_reference(x.float(), scores.float(), wide(first), wide(second), k, True, limit)
    rows, depth = (1, 256 if form == "mxfp4" else 128) if few_tokens else (16, 128)
    tiles = (Tile(rows, 64, depth, 4, 2), Tile(rows, 128, depth, 4, 2))
    found = device.mixture(x, scores, first, second, k, True, limit, few_tokens=few_tokens, tiles=tiles)
    assert_near(found, exact.to(dtype), 1e-5 if dtype is torch.float32 else 1.5e-2)


@pytest.mark.parametrize(("form", "hidden", "inner", "clamped"), [
    ("dense", 96, 40, False), ("fp8", 160, 144, False), ("mxfp4", 96, 160, True), ("int4_64", 128, 128, False),
])
def test_a_few_tokens_are_summed_and_rounded_as_many_by_a_batch_invariant_format(
        form: str, hidden: int, inner: int, clamped: bool) -> None:
    """Few tokens are equal to many, to the bit, on a GPU; the interpreter's products depend on the number of rows."""
    x, scores, first, second = case(form, 5, hidden, inner, 4, HALF, clamped)
    limit, fixed = 1.5 if clamped else None, (batch_invariant(first), batch_invariant(second))
    many = device.mixture(x, scores, *fixed, 2, True, limit, few_tokens=0)
    few = device.mixture(x, scores, *fixed, 2, True, limit)
    exact = mixture_reference(x.float(), scores.float(), wide(first), wide(second), 2, True, limit)
    assert_near(many, exact.to(HALF), 1.5e-2)
    torch.testing.assert_close(few, many, **({"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {}))


@pytest.mark.parametrize(("hidden", "inner", "dtype"), [(160, 144, HALF), (128, 128, torch.float32)])
def test_widened_experts_are_those_of_the_reference(hidden: int, inner: int, dtype: torch.dtype) -> None:
    x, _, first, second = case("fp8", 1, hidden, inner, 4, dtype, False)
    room = widening.allocate_wide(4, hidden, inner, x)
    for into in room:
        into.values.fill_(-7)
    widening.widen(first, second, room, torch.tensor([2, -1, 0, 3], dtype=torch.int32, device=DEVICE))
    for whole, into in zip((first, second), room, strict=True):
        for expert, slot in ((0, 2), (2, 0), (3, 3)):
            assert torch.equal(into.values[expert], whole.expert(slot, dtype))
        assert (into.values[1] == -7).all()
    widening.widen(first, second, room)
    for whole, into in zip((first, second), room, strict=True):
        assert torch.equal(into.values[1], whole.expert(1, dtype))


def test_a_large_step_widens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x, scores, first, second = case("fp8", 12, 160, 144, 4, HALF, False)
    exact = mixture_reference(x.float(), scores.float(), wide(first), wide(second), 2, True).to(x.dtype)
    narrow = device.mixture(x, scores, first, second, 2, True)
    monkeypatch.setattr(extents, "WIDE_TOKENS", 12)
    monkeypatch.setattr(extents, "WIDE_ROWS", 6)
    found = device.mixture(x, scores, first, second, 2, True)
    assert_near(found, exact, 1.5e-2)
    assert not torch.equal(found, narrow)  # rounded differently, so another path was used
    fixed = batch_invariant(first), batch_invariant(second)
    assert torch.equal(device.mixture(x, scores, *fixed, 2, True)[:10],
                       device.mixture(x[:10], scores[:10], *fixed, 2, True))
    monkeypatch.setattr(extents, "WIDE_ROWS", 7)
    assert torch.equal(device.mixture(x, scores, first, second, 2, True), narrow)


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_top_k_of_a_softmax(renormalize: bool) -> None:
    tokens, experts, k = 7, 11, 3
    scores = torch.randn(tokens, experts, device=DEVICE)
    scores[3, 4] = scores[3, 9] = scores[3, 2] = 5.0  # of equal scores, the lower id comes first
    x = torch.randn(tokens, 32, device=DEVICE)
    ids, shares, ready = routing.route(scores, x, k, renormalize, DENSE.experts)
    assert ready is x
    assert ids[3].tolist() == [2, 4, 9]
    probabilities = scores.softmax(-1)
    expected = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), expected.indices[:, :k])
    wanted = expected.values[:, :k]
    torch.testing.assert_close(shares, wanted / wanted.sum(-1, keepdim=True) if renormalize else wanted)


@pytest.mark.parametrize(("tokens", "tile"), [(1, 16), (70, 16), (130, 32), (1500, 64)])
def test_pairs_are_sorted_into_tiles_of_one_expert(tokens: int, tile: int) -> None:
    experts, k = 5, 2
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, experts, device=DEVICE).topk(k).indices.int()
    ids[ids == 3] = 1  # expert 3 is never chosen
    order, tiles = routing.sort_by_expert(ids, experts, tile)
    flat = ids.flatten()
    assert torch.equal(order.long(), flat.sort(stable=True).indices)
    counts = torch.bincount(flat, minlength=experts).tolist()
    expected: list[list[int]] = []
    start = 0
    for expert, count in enumerate(counts):
        expected += [[expert, start + at, start + count] for at in range(0, count, tile)]
        start += count
    assert tiles[: len(expected)].tolist() == expected
    assert len(tiles) == routing.most_tiles(tokens * k, experts, tile) >= len(expected)
    assert (tiles[len(expected) :, 0] == -1).all()


def test_any_routing_fits_the_grid() -> None:
    for pairs in (1, 2, 15, 16, 17, 31, 33, 250):
        for experts in (1, 3, 8):
            worst = max(_tiles(split, 16) for split in _splits(pairs, experts))
            assert worst <= routing.most_tiles(pairs, experts, 16) <= worst + experts


def _splits(pairs: int, experts: int) -> list[list[int]]:
    """Return all pairs on one expert, an even spread, and one pair per expert with the rest on the first."""
    even = [pairs // experts + (index < pairs % experts) for index in range(experts)]
    ragged = [min(1, max(0, pairs - index)) for index in range(experts)]
    ragged[0] += pairs - sum(ragged)
    return [[pairs], even, ragged]


def _tiles(counts: list[int], tile: int) -> int:
    return sum(-(-count // tile) for count in counts)


@pytest.mark.parametrize("form", ["dense", "mxfp4"])
def test_a_row_does_not_depend_on_the_rows_beside_it(form: str) -> None:
    dtype = torch.float32 if form == "dense" else torch.bfloat16
    x, scores, first, second = case(form, 9, 64, 64, 4, dtype, clamped=form == "mxfp4")
    kwargs: dict[str, Any] = {"limit": 7.0 if form == "mxfp4" else None,
                              "tiles": (Tile(16, 16, 64, 4, 2), Tile(16, 32, 64, 4, 2)), "few_tokens": 0}
    together = device.mixture(x, scores, first, second, 2, True, **kwargs)
    for row in range(0, 9, 4):
        alone = device.mixture(x[row : row + 1], scores[row : row + 1], first, second, 2, True, **kwargs)
        assert torch.equal(alone, together[row : row + 1])
