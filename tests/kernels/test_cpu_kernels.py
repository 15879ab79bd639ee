"""Each half of a layer as one native call gives the same bits as its kernels called one after another."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from spillover.kernels import native
from spillover.kernels.batch import AttentionBatch, LayerShape
from spillover.kernels.cpu_kernels import CpuKernels, LayerStack
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.gguf_codes import CODE_FORMS, Codes, pack_codes
from spillover.kernels.formats.packed import pack
from spillover.kernels.kv_quant import encode_blocks
from spillover.kernels.linear import linear
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import ResidentExperts, Routing

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.describe())

SHAPE = LayerShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, eps=1e-5)
HIDDEN, INNER, BLOCK, BLOCKS = 64, 96, 8, 5
EXPERTS = 6


def in_codes(weight: torch.Tensor, bits: int) -> Linear:
    """Return a weight of the same shape with arbitrary codes."""
    scales = weight[:, ::CODE_BLOCK].half() * (0.1 if bits == 4 else 0.01)
    codes = (weight * 1000).to(torch.int8)
    if bits == 8:
        return pack_codes([Codes(CODE_FORMS["Q8_0"], codes, (scales,))])
    return pack_codes([Codes(CODE_FORMS["Q4_1"], codes.view(torch.uint8) & 15, (scales, scales * -7))])


def weights(generator: torch.Generator, extras: bool, bits: int) -> dict[str, Any]:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.3

    def packed(*size: int) -> Linear:
        return in_codes(draw(*size), bits) if bits else pack(draw(*size))

    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    made: dict[str, Any] = {
        "input_norm": draw(HIDDEN), "mlp_norm": draw(HIDDEN), "qkv": packed(width, HIDDEN),
        "o": packed(HIDDEN, SHAPE.num_heads * SHAPE.head_dim),
        "gate_up": packed(2 * INNER, HIDDEN), "down": packed(HIDDEN, INNER),
    }
    if extras:
        made |= {"qkv_bias": draw(width), "o_bias": draw(HIDDEN), "q_norm": draw(SHAPE.head_dim),
                 "k_norm": draw(SHAPE.head_dim), "sinks": draw(SHAPE.num_heads), "gate_up_bias": draw(2 * INNER),
                 "down_bias": draw(HIDDEN)}
    return made


def mixture_weights(generator: torch.Generator, extras: bool, bits: int) -> dict[str, Any]:
    """Return the weights of a layer of which the MLP is a mixture of EXPERTS experts."""
    made, stacks = weights(generator, extras, bits), []
    for name in ("gate_up", "down"):
        experts = [weights(generator, extras, bits) for _ in range(EXPERTS)]
        linear = made.pop(name)
        stack = Linear(linear.format, linear.shape, (torch.stack([one[name].tensors[0] for one in experts]),))
        made.pop(f"{name}_bias", None)
        stacks.append(Experts(stack, torch.stack([one[f"{name}_bias"] for one in experts]) if extras else None))
    made |= {"router": pack(torch.randn(EXPERTS, HIDDEN, generator=generator)), "experts": ResidentExperts(*stacks)}
    if extras:
        made["router_bias"] = torch.randn(EXPERTS, generator=generator)
    return made


def make_batch(lengths: list[tuple[int, int]], kv_dtype: str, first_block: int = 1) -> AttentionBatch:
    """Return a batch of requests with (cached tokens, new tokens) each, and BLOCKS blocks per request."""
    return AttentionBatch(
        query_start=torch.tensor([0, *torch.tensor([new for _, new in lengths]).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([old + new for old, new in lengths], dtype=torch.int32),
        block_table=torch.arange(first_block, first_block + BLOCKS * len(lengths), dtype=torch.int32).view(-1, BLOCKS),
        positions=torch.cat([torch.arange(old, old + new) for old, new in lengths]),
        rows=torch.cat([torch.full((new,), i, dtype=torch.int32) for i, (_, new) in enumerate(lengths)]),
        block_size=BLOCK, kv_dtype=kv_dtype,
    )


def tables(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(64.0), torch.rand(SHAPE.head_dim // 2, generator=generator))
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(0, 13), (9, 1), (20, 5)], [(31, 1)] * 17])
def test_one_call_is_the_kernels_in_turn(lengths: list[tuple[int, int]], extras: bool, kv_dtype: str,
                                         bits: int) -> None:
    if bits and not native.multiplies_codes():
        pytest.skip("this CPU does not multiply codes")
    generator = torch.Generator().manual_seed(len(lengths))
    w = weights(generator, extras, bits)
    rows = sum(new for _, new in lengths)
    x, residual = torch.randn(rows, HIDDEN, generator=generator), torch.randn(rows, HIDDEN, generator=generator)
    pool = torch.randn(1 + BLOCKS * len(lengths), 2, SHAPE.num_kv_heads, BLOCK * SHAPE.head_dim, generator=generator)
    if kv_dtype != "auto":
        pool = encode_blocks(pool, BLOCK, kv_dtype)
    batch = make_batch(lengths, kv_dtype)
    kernels = CpuKernels(SHAPE, *tables(generator))
    for window in (None, 7):
        pools = pool.clone(), pool.clone()
        expected = kernels.attention_block_unfused(x.clone(), residual.clone(), w, pools[0], batch, window, 0)
        found = kernels.attention_block(x.clone(), residual.clone(), w, pools[1], batch, window, 0)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert torch.equal(*pools)
    expected = kernels.mlp_block_unfused(x.clone(), residual.clone(), w)
    found = kernels.mlp_block(x.clone(), residual.clone(), w)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("mixtures", [(), (1, 2, 3)])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(0, 13), (9, 1), (20, 5)], [(31, 1)] * 17])
def test_all_layers_at_once_are_the_layers_in_turn(lengths: list[tuple[int, int]], mixtures: tuple[int, ...],
                                                   extras: bool, kv_dtype: str, bits: int) -> None:
    if bits and not native.multiplies_codes():
        pytest.skip("this CPU does not multiply codes")
    generator = torch.Generator().manual_seed(len(lengths))
    layers = [(mixture_weights if layer in mixtures else weights)(generator, extras, bits) for layer in range(4)]
    routing = Routing(3, not extras, 7.0 if extras else None)
    groups, windows = [0, 1, 0, 1], [None, 7, None, 7]
    rows, blocks = sum(new for _, new in lengths), BLOCKS * len(lengths)
    batches = [make_batch(lengths, kv_dtype, 1 + group * blocks) for group in (0, 1)]
    cos, sin = tables(generator)
    x, residual = torch.randn(rows, HIDDEN, generator=generator), torch.randn(rows, HIDDEN, generator=generator)
    pool = torch.randn(1 + 2 * blocks, 2, 2, SHAPE.num_kv_heads, BLOCK * SHAPE.head_dim, generator=generator)
    if kv_dtype != "auto":
        pool = encode_blocks(pool, BLOCK, kv_dtype)
    pools = pool.clone(), pool.clone()
    kernels, expected = CpuKernels(SHAPE, cos, sin), (x.clone(), residual.clone())
    for layer, w in enumerate(layers):
        kv = pools[0][:, layer // 2]
        expected = kernels.attention_block(*expected, w, kv, batches[groups[layer]], windows[layer], layer)
        if layer in mixtures:
            normed, rest = kernels.add_rms_norm(*expected, w["mlp_norm"])
            scores = linear(normed, w["router"], w.get("router_bias"))
            expected = w["experts"].mixture(normed, scores, routing.k, routing.renormalize, routing.limit), rest
        else:
            expected = kernels.mlp_block(*expected, w)
    kv_layers = [(pools[1][:, layer // 2], groups[layer]) for layer in range(4)]
    stack = LayerStack(SHAPE, cos, sin, layers, kv_layers, windows, routing)
    found = x.clone(), residual.clone()
    before: list[bool] = []
    assert stack.run(*found, batches, lambda: before.append(torch.equal(found[0], x)))
    assert before == [True]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(*pools)


def test_what_the_native_kernels_do_not_serve_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    made = weights(generator, False, 0)
    assert LayerStack.serves([made])
    assert not LayerStack.serves([made, made | {"o": Linear(DENSE, made["o"].shape, (torch.randn(HIDDEN, 96),))}])
    batch = make_batch([(0, 2)], "auto")
    pool = torch.zeros(1 + BLOCKS, 1, 2, SHAPE.num_kv_heads, BLOCK * SHAPE.head_dim)
    stack = LayerStack(SHAPE, *tables(generator), [made], [(pool[:, 0], 0)], [None])
    x = torch.ones(2, HIDDEN)
    with native.traced(contextlib.nullcontext):  # tracing requires separate operations
        assert not stack.run(x, x, [batch], lambda: pytest.fail("nothing is run"))
    assert torch.equal(x, torch.ones(2, HIDDEN))
