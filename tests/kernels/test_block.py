"""A layer's halves as one native call give the bits that their kernels give one after the other."""

from __future__ import annotations

import pytest
import torch

from spillover.kernels import native
from spillover.kernels.attention import AttentionBatch
from spillover.kernels.block import (
    LayerShape,
    attention_block,
    attention_block_reference,
    mlp_block,
    mlp_block_reference,
)
from spillover.kernels.coded import BLOCK as CODE_BLOCK
from spillover.kernels.coded import CodedWeight, Codes, pack_codes
from spillover.kernels.kv_quant import encode_blocks
from spillover.kernels.linear import Weight, pack

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.describe())

SHAPE = LayerShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, eps=1e-5)
HIDDEN, INNER, BLOCK = 64, 96, 8


def in_codes(weight: torch.Tensor, bits: int) -> CodedWeight:
    """Any codes of its shape."""
    scales = weight[:, ::CODE_BLOCK].half() * (0.1 if bits == 4 else 0.01)
    codes = (weight * 1000).to(torch.int8)
    if bits == 8:
        return pack_codes([Codes(codes, scales, None)])
    return pack_codes([Codes(codes.view(torch.uint8) & 15, scales, scales * -7)])


def weights(generator: torch.Generator, extras: bool, bits: int) -> dict[str, object]:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.3

    def packed(*size: int) -> Weight:
        return in_codes(draw(*size), bits) if bits else pack(draw(*size))

    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    made: dict[str, object] = {
        "input_norm": draw(HIDDEN), "mlp_norm": draw(HIDDEN), "qkv": packed(width, HIDDEN),
        "o": packed(HIDDEN, SHAPE.num_heads * SHAPE.head_dim),
        "gate_up": packed(2 * INNER, HIDDEN), "down": packed(HIDDEN, INNER),
    }
    if extras:
        made |= {"qkv_bias": draw(width), "o_bias": draw(HIDDEN), "q_norm": draw(SHAPE.head_dim),
                 "k_norm": draw(SHAPE.head_dim), "sinks": draw(SHAPE.num_heads), "gate_up_bias": draw(2 * INNER),
                 "down_bias": draw(HIDDEN)}
    return made


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
    blocks = 5
    pool = torch.randn(1 + blocks * len(lengths), 2, SHAPE.num_kv_heads, BLOCK * SHAPE.head_dim, generator=generator)
    if kv_dtype != "auto":
        pool = encode_blocks(pool, BLOCK, kv_dtype)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *torch.tensor([new for _, new in lengths]).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([old + new for old, new in lengths], dtype=torch.int32),
        block_table=torch.arange(1, 1 + blocks * len(lengths), dtype=torch.int32).view(len(lengths), blocks),
        positions=torch.cat([torch.arange(old, old + new) for old, new in lengths]),
        rows=torch.cat([torch.full((new,), i, dtype=torch.int32) for i, (_, new) in enumerate(lengths)]),
        block_size=BLOCK, max_query=max(new for _, new in lengths), max_seq=max(old + new for old, new in lengths),
        kv_dtype=kv_dtype,
    )
    angles = torch.outer(torch.arange(64.0), torch.rand(SHAPE.head_dim // 2, generator=generator))
    cos, sin = angles.cos(), angles.sin()
    for window in (None, 7):
        pools = pool.clone(), pool.clone()
        expected = attention_block_reference(x.clone(), residual.clone(), w, SHAPE, cos, sin, pools[0], batch, window)
        found = attention_block(x.clone(), residual.clone(), w, SHAPE, cos, sin, pools[1], batch, window)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert torch.equal(*pools)
    expected = mlp_block_reference(x.clone(), residual.clone(), w, SHAPE)
    found = mlp_block(x.clone(), residual.clone(), w, SHAPE)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
