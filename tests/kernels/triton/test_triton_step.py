"""The rest of a step on the device: norms, activations, products of few rows or a fixed order, draws, tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from spillover.engine.batch.sampler import _inverse_cdf, _nucleus, _weights
from spillover.kernels.activation import silu_and_mul_reference
from spillover.kernels.extents import product_chunks
from spillover.kernels.norm import add_rms_norm_reference
from spillover.kernels.triton.activation import silu_and_mul
from spillover.kernels.triton.draw import CHUNK, draw
from spillover.kernels.triton.gemv import gemv, gemv_silu
from spillover.kernels.triton.norm import add_rms_norm
from spillover.kernels.triton.nucleus import keep_likely
from spillover.kernels.triton.ordered_linear import LARGE, TILES, ordered_linear, ordered_linear_silu
from spillover.kernels.triton.step_upload import copy_inputs, fill_tokens, update_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bfloat16 where the device rounds.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 1024, 5120])
def test_a_norm_after_the_residual_sum(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (normal(5, width, seed=i, dtype=dtype) for i in range(3))
    found, total = add_rms_norm(x, residual, weight[0], 1e-5)
    expected, sum_ = add_rms_norm_reference(x, residual, weight[0], 1e-5)
    assert torch.equal(total, sum_)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype: torch.dtype) -> None:
    x = 4 * normal(3, 2 * 1500, dtype=dtype)
    # Two roundings, each of which may go in the other direction.
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("inner", [600, 2048])
def test_products_of_one_row(inner: int) -> None:
    x, w, bias = normal(1, inner), normal(38, inner, seed=1), normal(38, seed=2)
    torch.testing.assert_close(gemv(x, w), F.linear(x, w), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gemv(x, w, bias), F.linear(x, w, bias), rtol=1e-4, atol=1e-4)
    gated = silu_and_mul_reference(F.linear(x, w, bias))
    torch.testing.assert_close(gemv_silu(x, w, bias), gated, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inner", "dtype"), [
    (inner, dtype) for inner in (192, 200, 1160, 1280) for dtype in DTYPES[:2]
])
def test_a_row_of_a_product_has_the_same_bits_among_any_others(inner: int, dtype: torch.dtype) -> None:
    """A row has the same bits through every tile, for a matrix with one chunk and for one with four."""
    rows, channels = 133 if DEVICE == "cpu" else 300, 24  # more rows than one tile has, enough for CUDA C++ on a GPU
    x, w, bias = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in
                  enumerate([(rows, inner), (channels, inner), (channels,)]))
    assert product_chunks(channels, inner)[0] == (1 if inner <= 200 else 4)
    # The interpreter's products are those of a library, in an unspecified order.
    exact = {"rtol": 0.0, "atol": 0.0} if DEVICE == "cuda" else {"rtol": 1e-2, "atol": 100 * torch.finfo(dtype).eps}
    product = F.linear(x.float(), w.float(), bias.float())
    for multiply, plain in ((ordered_linear, product), (ordered_linear_silu, silu_and_mul_reference(product))):
        whole = multiply(x, w, bias)
        torch.testing.assert_close(whole.float(), plain, rtol=1e-2, atol=2000 * torch.finfo(dtype).eps)
        for first, last in ((0, 1), (3, 9), (rows - 12, rows), (rows - 20, rows)):
            torch.testing.assert_close(multiply(x[first:last], w, bias), whole[first:last], **exact)
    if dtype is torch.float32 or inner not in (200, 1160):  # float32 has no tiles
        return
    for tile in {tile for tiles in TILES.values() for tile in tiles} | {LARGE}:
        torch.testing.assert_close(ordered_linear(x, w, bias, tile), ordered_linear(x, w, bias), **exact)


@pytest.mark.parametrize(("channels", "inner", "chunks"), [
    (6144, 1024, (4, 256)), (6144, 4096, (4, 1024)), (4096, 14336, (4, 3584)), (24576, 4096, (1, 4096)),
    (5120, 2880, (4, 768)), (64, 100, (1, 128)),
])
def test_chunks_are_whole_and_cover_the_matrix(channels: int, inner: int, chunks: tuple[int, int]) -> None:
    assert product_chunks(channels, inner) == chunks


def test_draws_are_those_of_the_sampler() -> None:
    vocab = 2 * CHUNK + 77
    logits = 3 * normal(6, vocab)
    logits[4, 100:] = -torch.inf
    logits[1, [5, CHUNK + 3]] = 50.0  # equal logits: the first of them counts as the largest
    temperature = torch.tensor([0.0, 0.0, 1.0, 0.5, 1.3, 1.0], device=DEVICE)
    uniform = torch.tensor([0.3, 0.9, 0.0, 0.7, 0.999999999, 1.0 - 2**-53], dtype=torch.float64, device=DEVICE)
    found = torch.full((6,), -1, dtype=torch.int64, device=DEVICE)
    draw(logits, temperature, uniform, found)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    expected = _inverse_cdf(_weights(scaled, scaled.amax(-1, keepdim=True)), uniform)
    expected[:2] = logits[:2].cpu().argmax(-1).to(DEVICE)
    assert found[1] == 5
    assert torch.equal(found, expected)
    half = torch.empty_like(found)
    draw(logits.to(torch.float16), temperature, uniform, half)
    again = torch.empty_like(found[2:4])
    draw(logits[2:4].to(torch.float16), temperature[2:4], uniform[2:4], again)
    assert torch.equal(half[2:4], again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_left_to_choose_from_is_what_the_sampler_leaves(dtype: torch.dtype) -> None:
    """The same tokens remain as in the sampler, with ties at the last one, and rows with one or several filters."""
    vocab = CHUNK + 500
    logits = (2 * normal(9, vocab)).round(decimals=1).to(dtype)
    logits[8, 50:] = -torch.inf
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.5, 1.0, 1.0, 0.6, 1.0], device=DEVICE)
    top_k = torch.tensor([5, 1, 40, 0, 700, 0, 0, 20, 0], device=DEVICE)
    top_p = torch.tensor([0.5, 1.0, 1.0, 0.9, 0.5, 1.0, 0.01, 0.95, 0.99], dtype=torch.float64, device=DEVICE)
    min_p = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.02, 0.0], device=DEVICE)
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    unlikely = (scaled - scaled.amax(-1, keepdim=True)).exp() < min_p.unsqueeze(1)
    scaled = scaled.masked_fill(unlikely, -torch.inf)
    keep = _nucleus(scaled, top_k.unsqueeze(1), top_p.unsqueeze(1), None)
    expected = logits.masked_fill(~keep | unlikely, -torch.inf)
    expected[0] = logits[0]
    found = keep_likely(logits, temperature, top_k, top_p, min_p)
    assert (found[1] > -torch.inf).sum() == 1
    assert torch.equal(found, expected)


def test_draws_are_written_to_the_host_too() -> None:
    logits = normal(5, 300)
    host = torch.zeros(4, 8, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    found, turn = torch.empty(5, dtype=torch.int64, device=DEVICE), torch.tensor([2], dtype=torch.int32, device=DEVICE)
    draw(logits, torch.zeros(5, device=DEVICE), torch.zeros(5, dtype=torch.float64, device=DEVICE), found, host, turn)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host[2, :5].tolist() == found.tolist() == logits.argmax(-1).tolist()
    assert host.count_nonzero() == host[2, :5].count_nonzero()


@pytest.mark.parametrize("nbytes", [0, 3, 8, 4096, 10_000])
def test_bytes_are_brought_from_the_host(nbytes: int) -> None:
    pinned = torch.arange(12_000).to(torch.uint8)
    pinned = pinned.pin_memory() if DEVICE == "cuda" else pinned
    found = torch.full((12_000,), 255, dtype=torch.uint8, device=DEVICE)
    copy_inputs(found.view(torch.int64), pinned.view(torch.int64), nbytes)
    whole = -(-nbytes // 8) * 8
    assert torch.equal(found[:whole].cpu(), pinned[:whole])
    assert (found[whole:] == 255).all()


def test_draws_follow_the_probabilities() -> None:
    """Evenly spread random numbers hit every token as often as its probability requires."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]], device=DEVICE)
    count = 64
    found = torch.empty(count, dtype=torch.int64, device=DEVICE)
    spread = (torch.arange(count, dtype=torch.float64, device=DEVICE) + 0.5) / count
    draw(logits.expand(count, 4), torch.full((count,), 0.7, device=DEVICE), spread, found)
    expected = (logits[0] / 0.7).softmax(-1) * count
    assert (torch.bincount(found, minlength=4) - expected).abs().max() <= 1


def test_pending_tokens_and_table_entries_take_their_places() -> None:
    tokens = torch.arange(300, dtype=torch.int64, device=DEVICE)
    sources = torch.full((300,), -1, dtype=torch.int32, device=DEVICE)
    sources[[2, 299]] = torch.tensor([7, 1], dtype=torch.int32, device=DEVICE)
    drawn = torch.arange(1000, 1010, device=DEVICE)
    fill_tokens(tokens, sources, drawn)
    assert tokens[[1, 2, 3, 299]].tolist() == [1, 1007, 3, 1001]
    tables = torch.zeros(2, 3, 4, dtype=torch.int32, device=DEVICE)
    updates = torch.tensor([2, 0, 5, 50, 23, 60, 1, 99], dtype=torch.int32, device=DEVICE)  # the third is ignored
    update_tables(tables, updates, 3)
    assert tables.flatten()[[5, 23, 1]].tolist() == [50, 60, 0]
    assert int(tables.sum()) == 110
