"""Blocks encoded and decoded on the device have the bits of the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from spillover.kernels import kv_quant
from spillover.kernels.triton import int4_codec
from spillover.kernels.triton.block_codec import decode_blocks, encode_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bfloat16 where the device rounds.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def made(block_size: int, dim: int) -> torch.Tensor:
    """Return seven blocks of two layers and three heads: many magnitudes, a head and some tokens of zeros."""
    generator = torch.Generator().manual_seed(dim)
    pool = torch.randn(7, 2, 2, 3, block_size * dim, generator=generator)
    pool *= 10.0 ** torch.randint(-4, 2, pool.shape, generator=generator)
    pool[3, 0, 0, 1] = 0.0
    pool[:, :, 1, :, : 2 * dim] = 0.0  # two tokens of every head
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("block_size", "dim"), [(8, 16), (16, 64), (24, 72), (16, 128)])
def test_bits_are_those_of_the_reference(block_size: int, dim: int, kind: str, dtype: torch.dtype) -> None:
    pool = made(block_size, dim).to(DEVICE, dtype)
    blocks = torch.tensor([5, 3, 1, 6], device=DEVICE)
    codes = encode_blocks(pool, blocks, block_size, kind)
    assert torch.equal(codes, kv_quant.encode_blocks(pool[blocks], block_size, kind))
    targets, other = torch.tensor([2, 0, 4, 1], device=DEVICE), torch.full_like(pool, 7)
    decode_blocks(codes, other, targets, block_size, kind)
    assert torch.equal(other[targets], kv_quant.decode_blocks(codes, block_size, kind, dtype))
    assert (other[[3, 5, 6]] == 7).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, "fp8", "int8"], ids=str)
@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (24, 72)])
def test_four_bits_are_those_of_the_reference(block_size: int, dim: int, kind: torch.dtype | str) -> None:
    """The bits are those of the reference, from and to a pool of numbers or of 8-bit codes."""
    pool = made(block_size, dim)
    if isinstance(kind, str):
        pool, pool_dtype, dtype = kv_quant.encode_blocks(pool, block_size, kind).to(DEVICE), kind, torch.uint8
    else:
        pool, pool_dtype, dtype = pool.to(DEVICE, kind), "auto", kind
    codec = kv_quant.KVCodec(2, 3, block_size, dim, dtype, "int4", pool_dtype)
    blocks, targets = torch.tensor([5, 3], device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    codes = int4_codec.encode_blocks(pool, blocks, block_size, pool_dtype)
    assert torch.equal(codes.flatten(1), codec.encode_tensor(pool[blocks].flatten(1).view(torch.uint8)))
    if kind is torch.bfloat16 and DEVICE == "cpu":
        return  # the interpreter truncates to bfloat16 where the device rounds
    other = torch.full_like(pool, 7)
    int4_codec.decode_blocks(codes, other, targets, block_size, pool_dtype)
    assert torch.equal(other[targets].flatten(1).view(torch.uint8), codec.decode_tensor(codes.flatten(1)))
    assert (other[[1, 3, 4, 5, 6]] == 7).all()
