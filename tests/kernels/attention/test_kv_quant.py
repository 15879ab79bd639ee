"""KV in one byte or four bits per value: small errors, never NaN, and the same bits from every encoder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.kernels import kv_int4, native
from spillover.kernels.kv_quant import KVCodec, decode, decode_blocks, encode, encode_blocks, head_bytes, views
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.link_cpu import CpuLink

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
kinds = st.sampled_from(["fp8", "int8"])
SUBNORMAL = 1e-40


def draw(shape: tuple[int, ...], seed: int, magnitude: float) -> Tensor:
    """Return values of all sizes up to `magnitude`, with zeros of both signs, whole tokens of zeros, and exact ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).clamp(-3, 3) / 3
    x *= 10.0 ** torch.randint(-5, 1, shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x)
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, -0.0, x)
    ties = torch.randint(-254, 255, shape, generator=generator) / 254  # halves of int8 steps if the largest is 1
    x = torch.where(torch.rand(shape, generator=generator) < 0.2, ties, x)
    x = torch.where(torch.rand((*shape[:-1], 1), generator=generator) < 0.1, 0.0, x)
    return x * magnitude


magnitudes = st.sampled_from([0.0, 1e-45, 3e-43, SUBNORMAL, 1e-30, 1.0, 448.0, 65504.0, 3.4e38])


def memory_of(x: Tensor) -> memoryview:
    return memoryview(x.view(torch.uint8).numpy().reshape(-1))


@settings(max_examples=80, deadline=None)
@given(kind=kinds, seed=st.integers(0, 9999), magnitude=magnitudes, width=st.integers(1, 80))
def test_the_error_is_bounded_and_nothing_turns_to_nan(kind: str, seed: int, magnitude: float, width: int) -> None:
    x = draw((7, width), seed, magnitude)
    codes, scales = encode(x, kind)
    back = decode(codes, scales, kind)
    assert codes.dtype is torch.uint8
    assert back.isfinite().all()
    assert scales.isfinite().all()
    peak = x.abs().amax(-1)
    assert (codes[peak == 0] == 0).all()
    assert torch.equal(scales == 0, peak / (448 if kind == "fp8" else 127) == 0)
    # fp8 has three bits of mantissa, and steps of 2^-9 near zero; int8 has steps of one. A scale that is a subnormal
    # float, for values around 1e-40, is itself rounded to a step of 1.4e-45, which counts once per unit of the code.
    steps, units = scales.double()[:, None], 448 if kind == "fp8" else 127
    relative = x.double().abs() / 16 if kind == "fp8" else 0.0
    bound = relative + steps * (2**-10 if kind == "fp8" else 0.5) + units * 1.5e-45 + x.double().abs() * 1e-6
    assert ((back.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_code_that_encoding_makes_comes_back_as_itself(kind: str) -> None:
    if kind == "int8":
        values = torch.arange(-127.0, 128.0)
    else:
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = values[values.isfinite()]
    codes, scale = encode(values, kind)
    assert scale == 1
    assert torch.equal(decode(codes, scale, kind), values)
    assert len(codes.unique()) == len(values)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), magnitude=st.sampled_from([0.0, 1e-45, SUBNORMAL, 1e-30, 1.0, 65504.0, 1e35]),
       head_dim=st.sampled_from([2, 8, 24, 64, 72, 80, 128]))
def test_the_error_of_four_bits_is_bounded(seed: int, magnitude: float, head_dim: int) -> None:
    """A rotation keeps lengths, so a token's error is at most half a step in each of its rotated dimensions."""
    x = draw((5, head_dim), seed, magnitude).mT  # [D, tokens]
    codes, scales = kv_int4.encode(x)
    back = kv_int4.decode(codes, scales)
    assert (codes.shape, scales.shape) == ((head_dim // 2, 5), (5,))
    assert back.isfinite().all()
    assert (back[:, (x == 0).all(0)] == 0).all()
    chunk = kv_int4.chunk_of(head_dim)
    top = kv_int4.rotate(x.double()).abs().amax(0)
    coarse = 7.5 * 2.0**-134  # error of the largest code if a subnormal scale is rounded to a step of 2**-133
    bound = (head_dim / chunk) ** 0.5 * (top / 15 * 1.01 + coarse) + 1e-6 * x.double().norm(dim=0)
    assert ((back.double() - x.double()).norm(dim=0) <= bound).all()


def test_rotating_spreads_a_large_dimension() -> None:
    """The rotation preserves small dimensions next to one ten times as large, which keys have."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 200, generator=generator)
    assert torch.equal(kv_int4.rotate(kv_int4.rotate(x.round())), x.round() * 64)
    x[5] += 12
    error = (kv_int4.decode(*kv_int4.encode(x)) - x)[torch.arange(64) != 5].norm(dim=0) / 63**0.5
    assert error.mean() < 0.25
    plain = x.abs().amax(0) / 15  # half a step without the rotation
    assert (error < plain * 0.5).all()


POOLS = st.sampled_from([("fp8", "auto"), ("int8", "auto"), ("int4", "auto"), ("int4", "fp8"), ("int4", "int8")])


@needs_native
@settings(max_examples=80, deadline=None)
@given(kinds=POOLS, seed=st.integers(0, 9999), magnitude=magnitudes, layers=st.integers(1, 3), heads=st.integers(1, 3),
       block_size=st.sampled_from([8, 16, 24, 32, 48]), head_dim=st.sampled_from([8, 16, 24, 64, 72, 80]))
def test_native_equals_the_reference_bit_by_bit(
    kinds: tuple[str, str], seed: int, magnitude: float, layers: int, heads: int, block_size: int, head_dim: int
) -> None:
    kind, pool_dtype = kinds
    coded = pool_dtype != "auto"
    codec = KVCodec(layers, heads, block_size, head_dim, torch.uint8 if coded else torch.float32, kind, pool_dtype)
    x = draw((layers, 2, heads, block_size, head_dim), seed, magnitude if kind != "int4" else min(magnitude, 1e35))
    x[:, 0] = x[:, 0].mT.flatten().view(x[:, 0].shape)  # so that a key token may be all zeros
    block = (encode_blocks(x.flatten(-2), block_size, pool_dtype) if coded else x).flatten().view(torch.uint8)
    slot = torch.full((codec.slot_bytes,), 0xAA, dtype=torch.uint8)
    codec.encode(memory_of(block), memory_of(slot))
    wanted = codec.encode_tensor(block)
    assert torch.equal(slot, wanted)
    back = torch.full_like(block, 0xAA)
    codec.decode(memory_of(slot), memory_of(back))
    assert torch.equal(back, codec.decode_tensor(wanted))


@needs_native
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_native_reads_every_code(kind: str) -> None:
    """All codes are read, as keys and as values, in vectors of both widths, except the two NaN codes, never written."""
    for block_size, head_dim in ((16, 32), (8, 72)):
        codec = KVCodec(1, 1, block_size, head_dim, torch.float32, kind)
        slot = torch.zeros(1, 2, 1, head_bytes(block_size, head_dim), dtype=torch.uint8)
        keys, key_scales, values, value_scales = views(slot, block_size)
        for codes in (keys, values):
            all_codes = torch.arange(256, dtype=torch.uint8)
            made = all_codes[(all_codes & 0x7F) != 0x7F] if kind == "fp8" else all_codes
            codes.copy_(made[torch.arange(codes.numel()) % len(made)].view(codes.shape))
        key_scales.copy_(torch.linspace(0.1, 3, block_size))
        value_scales.copy_(torch.linspace(-2, 1e-41, block_size))
        back = torch.zeros(2 * block_size * head_dim)
        codec.decode(memory_of(slot), memory_of(back))
        wanted = decode_blocks(slot, block_size, kind, torch.float32).flatten()
        assert torch.equal(back.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_block_is_encoded_token_by_token(kind: str) -> None:
    """The layout is as documented: codes in the block's order, then one little-endian scale per token."""
    block_size, head_dim = 8, 3
    x = torch.randn(2, 2, 2, block_size * head_dim)
    slots = encode_blocks(x, block_size, kind)
    assert slots.shape == (2, 2, 2, head_bytes(block_size, head_dim))
    for layer in range(2):
        for head in range(2):
            keys = x[layer, 0, head].view(head_dim, block_size)
            values = x[layer, 1, head].view(block_size, head_dim)
            for part, rows in ((0, keys.T), (1, values)):
                raw = bytes(slots[layer, part, head].tolist())
                codes, scales = encode(rows, kind)
                order = codes.T if part == 0 else codes
                assert raw[: block_size * head_dim] == bytes(order.flatten().tolist())
                assert raw[block_size * head_dim :] == scales.numpy().astype("<f4").tobytes()


@pytest.mark.parametrize(("kind", "row"), [("fp8", 36), ("int8", 36), ("int4", 18)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_cross_the_link_narrow_and_come_back(dtype: torch.dtype, kind: str, row: int) -> None:
    codec = KVCodec(3, 2, 16, 32, dtype, kind)
    pool = torch.randn(6, 3, 2, 2, 16 * 32).to(dtype)
    wanted = encode_blocks(pool[2], 16, kind)
    link = CpuLink(memory_of(pool), codec.block_bytes, CpuTransfers(), codec)
    assert link.slot_bytes == codec.slot_bytes == 3 * 2 * 2 * 16 * row
    slot = link.allocate(link.slot_bytes)
    before = pool.clone()
    link.copy_out([2], [slot])
    assert bytes(slot) == bytes(wanted.flatten().tolist())
    link.copy_in([slot], [5])
    assert torch.equal(pool[:5], before[:5])
    assert torch.equal(pool[5], decode_blocks(wanted, 16, kind, dtype))
    tolerance = {"rtol": 0.08, "atol": 0.03} if kind != "int4" else {"rtol": 0.0, "atol": 0.6}
    torch.testing.assert_close(pool[5].float(), before[2].float(), **tolerance)


def test_four_bits_near_the_largest_float16_stay_finite() -> None:
    codec = KVCodec(1, 1, 8, 16, torch.float16, "int4")
    pool = torch.full((1, 2, 1, 8 * 16), 65504.0, dtype=torch.float16)
    pool[..., ::3] = -65504.0
    back = codec.decode_tensor(codec.encode_tensor(pool.flatten().view(torch.uint8))).view(torch.float16)
    assert back.isfinite().all()


def test_wrong_sizes_are_refused() -> None:
    codec = KVCodec(1, 1, 8, 8, torch.float32, "int8")
    with pytest.raises(ValueError, match="blocks are 512 bytes and slots 192"):
        codec.encode(memoryview(bytearray(511)), memoryview(bytearray(192)))
    with pytest.raises(ValueError, match="not 512 and 193"):
        codec.decode(memoryview(bytearray(193)), memoryview(bytearray(512)))
