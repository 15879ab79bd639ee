"""A mixture of experts on a GPU, for 1 to 8,192 tokens: close to float32 on either path, with a CUDA graph or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spillover.kernels.fields import LinearShape
from spillover.kernels.formats import fp8_block, mxfp4
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import mixture, mixture_reference
from support.kernels import mixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FORMS = ["dense", "fp8", "mxfp4", "int4_128", "int4_32", "int8_64", "gguf_Q4_K", "gguf_Q5_1", "gguf_Q6_K",
         "gguf_Q6_K_and_Q4_K"]
EXPERTS, K = 16, 4
SIZES = {"dense": (320, 192), "fp8": (384, 320), "mxfp4": (352, 288),
         "int4_128": (384, 256), "int4_32": (256, 128), "int8_64": (384, 128),
         "gguf_Q4_K": (512, 256), "gguf_Q5_1": (384, 128), "gguf_Q6_K": (256, 256),
         "gguf_Q6_K_and_Q4_K": (256, 512)}  # some sizes are not multiples of a tile


def stack(form: str, rows: int, columns: int, biased: bool, parts: int = 1, dtype: torch.dtype = torch.bfloat16,
          experts: int = EXPERTS) -> Experts:
    weight = torch.randn(experts, rows, columns, device="cuda") * columns**-0.5
    bias = torch.randn(experts, rows, device="cuda", dtype=dtype) if biased else None
    shape = LinearShape((rows // parts,) * parts, columns)
    if form == "dense":
        return Experts(Linear(DENSE, shape, (weight.to(dtype),)), bias)
    if form.startswith(("int", "gguf")):
        return mixtures.stack(weight, form, bias, parts)
    if form == "mxfp4":
        blocks, scales = mxfp4.quantize(weight)
        padding = mxfp4.padded(scales.shape[-1]) - scales.shape[-1]
        scales = torch.nn.functional.pad(scales, (0, padding))
        return Experts(Linear(mxfp4.MXFP4, shape, (blocks.flatten(-2), scales)), bias)
    pieces = [[fp8_block.quantize(piece) for piece in one.chunk(parts)] for one in weight]
    values = torch.stack([torch.cat([value for value, _ in each]) for each in pieces])
    scales = torch.stack([torch.cat([scale for _, scale in each]) for each in pieces])
    return Experts(Linear(fp8_block.FP8_BLOCK, shape, (values, scales)), bias)


def stacks(form: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Experts, Experts, float | None]:
    hidden, inner = SIZES[form]
    clamped = form == "mxfp4"
    first = stack(form, 2 * inner, hidden, clamped, 1 if clamped else 2, dtype)
    return first, stack(form, hidden, inner, clamped, dtype=dtype), 2.0 if clamped else None


def inputs(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    return x, 2 * torch.randn(tokens, EXPERTS, device="cuda", dtype=dtype)


def wide(experts: Experts) -> Experts:
    each = [experts.expert(index, torch.float32).float() for index in range(experts.count)]
    return Experts(Linear(DENSE, experts.weight.shape, (torch.stack(each),)),
                   None if experts.bias is None else experts.bias.float())


def batch_invariant(experts: Experts) -> Experts:
    weight = experts.weight
    return Experts(Linear(weight.format.batch_invariant(), weight.shape, weight.tensors), experts.bias)


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_near_float32_for_any_number_of_tokens(form: str) -> None:
    first, second, limit = stacks(form)
    exact = wide(first), wide(second)
    for tokens in (1, 2, 5, 8, 9, 31, 64, 257, 1024, 8192):
        x, scores = inputs(tokens, second.expert(0, torch.float32).shape[0])
        expected = mixture_reference(x.float(), scores.float(), *exact, K, True, limit)
        found = mixture(x, scores, first, second, K, True, limit)
        error = (found.float() - expected).norm() / expected.norm()
        assert error.item() < 8e-3, f"{tokens} tokens"


@torch.inference_mode()
def test_float32_is_exact_to_its_rounding() -> None:
    first, second, _ = stacks("dense", torch.float32)
    for tokens in (3, 40):
        x, scores = inputs(tokens, SIZES["dense"][0], torch.float32)
        expected = mixture_reference(x, scores, first, second, K, False)
        torch.testing.assert_close(mixture(x, scores, first, second, K, False), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_all_tokens_may_choose_the_same_experts(form: str) -> None:
    first, second, limit = stacks(form)
    for tokens in (8, 300):
        x, scores = inputs(tokens, second.expert(0, torch.float32).shape[0])
        scores[:, 3:7] += 100
        exact = wide(first), wide(second)
        expected = mixture_reference(x.float(), scores.float(), *exact, K, True, limit)
        found = mixture(x, scores, first, second, K, True, limit)
        assert ((found.float() - expected).norm() / expected.norm()).item() < 8e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [4, 100])
@torch.inference_mode()
def test_a_graph_holds_it_and_follows_the_routing(form: str, tokens: int) -> None:
    first, second, limit = stacks(form)
    x, scores = inputs(tokens, second.expert(0, torch.float32).shape[0])
    mixture(x, scores, first, second, K, True, limit)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = mixture(x, scores, first, second, K, True, limit)
    for _ in range(3):
        fresh, fresh_scores = inputs(tokens, x.shape[1])
        x.copy_(fresh)
        scores.copy_(fresh_scores)
        graph.replay()
        assert torch.equal(recorded, mixture(fresh, fresh_scores, first, second, K, True, limit))


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it(form: str) -> None:
    first, second, limit = stacks(form)
    x, scores = inputs(8, second.expert(0, torch.float32).shape[0])
    together = mixture(x, scores, first, second, K, True, limit)
    alone = [mixture(x[row : row + 1], scores[row : row + 1], first, second, K, True, limit) for row in range(8)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_batch_invariant_gives_a_row_the_same_bits_whatever_the_number_of_rows(form: str) -> None:
    first, second, limit = stacks(form)
    first, second = batch_invariant(first), batch_invariant(second)
    x, scores = inputs(1500, second.expert(0, torch.float32).shape[0])
    whole = mixture(x, scores, first, second, K, True, limit)
    for size in (1, 8, 30, 200, 700):
        part = mixture(x[:size], scores[:size], first, second, K, True, limit)
        assert torch.equal(part, whole[:size]), f"{size} rows"
