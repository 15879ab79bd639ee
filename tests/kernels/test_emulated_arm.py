"""The native kernels for ARM cores, emulated: close to the reference, the same bits in every batch, and with weights in
codes the same bits as on this machine."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.activation import (
    clamped_swiglu,
    clamped_swiglu_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from spillover.kernels.attention import attention, attention_reference, store_kv, store_kv_reference
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.fp8_block import FP8_BLOCK, blocks
from spillover.kernels.formats.fp8_panels import Fp8Panels
from spillover.kernels.formats.gguf_codes import grouped_codes, pack_codes, unpack_codes
from spillover.kernels.formats.packed import pack
from spillover.kernels.kv_quant import KVCodec, encode_blocks
from spillover.kernels.linear import embedding, linear, unpack
from spillover.kernels.native.build import FLAGS, LEVELS, SOURCES
from spillover.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from spillover.kernels.rope import rope, rope_reference
from spillover.models.architectures import llama
from spillover.models.config import ModelConfig
from spillover.plan.hardware import probe
from spillover.plan.planner import PlanRequest, make_plan
from support.kernels.emulated import COMPILER, EmulatedLibrary, emulated, missing
from support.kernels.sequences import sequences
from support.models.coded_weights import KINDS, NVFP4, coded, room
from support.models.loading import dummy_weights

pytestmark = [
    pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="runs these kernels itself"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

CORES = {level.name: level.cores for level in LEVELS["aarch64"]}
EMULATED = ("activation", "attention", "kv_quant", "linear", "norm", "rope", "team")
ROWS = [1, 2, 3, 5, 17]
SHAPES = [(70, 64), (33, 320)]  # of weights


@pytest.fixture
def neoverse() -> Iterator[EmulatedLibrary]:
    """Yield cores that have instructions for dot products of bytes, but not for matrix products."""
    with emulated(CORES["dotprod"], *EMULATED) as found:
        yield found


@pytest.mark.parametrize("source", [source for source in SOURCES if source.stem not in (*EMULATED, "coded")],
                         ids=lambda source: source.stem)
@pytest.mark.parametrize("level", CORES)
def test_the_others_compile(source: Path, level: str) -> None:
    subprocess.run([COMPILER, CORES[level], *FLAGS, "-Werror", "-fsyntax-only", str(source)], check=True)


def test_products_with_panels(neoverse: EmulatedLibrary) -> None:
    for n, k in SHAPES:
        x, plain, bias = torch.randn(max(ROWS), k), torch.randn(n, k), torch.randn(n)
        packed = pack(plain)
        assert torch.equal(unpack(packed), plain)
        exact = x.double() @ plain.double().T + bias
        magnitude = x.double().abs() @ plain.double().abs().T + bias.abs()
        found = {rows: linear(x[:rows], packed, bias) for rows in ROWS}
        assert ((found[17] - exact).abs() <= magnitude * (k + 1) * 2.0**-24).all()
        assert all(torch.equal(found[rows], found[17][:rows]) for rows in ROWS)
        ids = torch.randint(0, n, (20,))
        assert torch.equal(embedding(ids, packed), plain[ids])


def test_products_with_fp8_are_those_of_the_dequantised_weights(neoverse: EmulatedLibrary) -> None:
    for n, k in SHAPES:
        shape = LinearShape((n,), k)
        form = FP8_BLOCK.packed(native.panel_width(), shape)
        assert isinstance(form, Fp8Panels)
        codes = torch.arange(n * k).view(n, k).remainder(256).to(torch.uint8)
        codes[codes & 127 == 127] = 0  # not a number
        scales = torch.rand(blocks(n), blocks(k))
        weight = Linear(form, shape, form.packed_tensors(shape, (codes.view(torch.float8_e4m3fn), scales)))
        whole = pack(form.dequantize(weight, torch.float32))
        for rows in ROWS:
            x = torch.randn(rows, k)
            assert torch.equal(linear(x, weight), linear(x, whole))


def test_the_planner_counts_panels_as_these_cores_pack_them(neoverse: EmulatedLibrary) -> None:
    config = ModelConfig("LlamaForCausalLM", vocab_size=100, hidden_size=48, num_layers=2, num_heads=3, num_kv_heads=1,
                         head_dim=16, intermediate_size=72, rms_norm_eps=1e-5, rope_theta=1e4, max_position=64)
    specs = llama.weight_specs(config)
    plan = make_plan(PlanRequest(device="cpu", dtype="float32", max_model_len=64), config, specs, probe())
    weights = dummy_weights(specs, torch.float32, torch.device("cpu"))
    assert plan.weight_bytes == sum(w.nbytes for part in weights.parts.values() for w in part.values())


def in_groups(bits: int, n: int, k: int) -> Linear:
    low, dtype = (0, torch.uint8) if bits == 4 else (-128, torch.int8)
    values = torch.randint(low, low + (1 << bits), (n, k)).to(dtype)
    scales = torch.randn(n, k // 128).half().float()
    return pack_codes([grouped_codes(values, scales, torch.randint(-15, 16, scales.shape) * scales)])


@pytest.mark.parametrize("level", ["dotprod", "i8mm"])
def test_products_with_codes(level: str) -> None:
    weights: dict[tuple[Kind | str | int, int, int], tuple[Linear, Tensor, Tensor]] = {}
    here = {}
    for kind in (*KINDS, *NVFP4, 4, 8):  # 4 and 8: bits of integers in groups of 128
        step = GGML_QUANT_SIZES[kind][0] if isinstance(kind, Kind) else 32 if kind in NVFP4 else 128
        for n, k in SHAPES if step == 32 else [(70, 512)]:
            sizes = torch.exp2(torch.randint(-10, 10, (k,)))  # columns differ in magnitude, as in activations
            weight = coded(kind, n, k) if isinstance(kind, Kind | str) else in_groups(kind, n, k)
            weights[kind, n, k] = weight, torch.randn(max(ROWS), k) * sizes, torch.randn(n)
            if native.multiplies_codes():
                here[kind, n, k] = linear(weights[kind, n, k][1], weights[kind, n, k][0], weights[kind, n, k][2])
    with emulated(CORES[level], "coded", "team") as library:
        assert library.multiplies_codes() == 1
        for key, (weight, x, bias) in weights.items():
            found = {rows: linear(x[:rows], weight, bias) for rows in ROWS}
            assert all(torch.equal(found[rows], found[17][:rows]) for rows in ROWS), key
            plain = unpack_codes(weight)
            error = (found[17].double() - x.double() @ plain.double().T - bias.double()).abs()
            assert (error <= room(x, plain) + 1e-6 * found[17].abs()).all(), key
            if key in here:
                assert torch.equal(found[17], here[key]), key
            ids = torch.randint(0, weight.shape.out_features, (20,))
            assert torch.equal(embedding(ids, weight), plain[ids])
        weight, x, bias = weights[Kind.Q4_1, 70, 64]
        expected = linear(x, weight, bias)
        library.set_threads(3)
        assert torch.equal(linear(x, weight, bias), expected)
        for rows in (1, 2):
            x = torch.randn(rows, 64)
            x[0, 5] = math.nan
            assert not linear(x, weight)[0].isfinite().any()


def test_norms_activations_and_positions(neoverse: EmulatedLibrary) -> None:
    for dim in (7, 64, 576):
        x, residual, weight = torch.randn(3, dim) * 3, torch.randn(3, dim), torch.randn(dim)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
        normed, total = add_rms_norm(x, residual, weight, 1e-5)
        wanted, wanted_total = add_rms_norm_reference(x, residual, weight, 1e-5)
        torch.testing.assert_close(normed, wanted)
        assert torch.equal(total, wanted_total)
    x = torch.cat((torch.randn(4, 96) * 30, torch.tensor([[0.0, -0.0, math.inf, -math.inf] * 24])))
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x), equal_nan=True)
    torch.testing.assert_close(clamped_swiglu(x[:4], 7.0), clamped_swiglu_reference(x[:4], 7.0))
    angles = torch.randn(50, 16)
    q, k, positions = torch.randn(5, 6, 32), torch.randn(5, 2, 32), torch.tensor([0, 3, 49, 7, 7])
    wanted_q, wanted_k = rope_reference(q, k, angles.cos(), angles.sin(), positions)
    found_q, found_k = rope(q.clone(), k.clone(), angles.cos(), angles.sin(), positions)
    torch.testing.assert_close(found_q, wanted_q)
    torch.testing.assert_close(found_k, wanted_k)


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("window", [None, 40])
def test_attention(neoverse: EmulatedLibrary, window: int | None, kind: str) -> None:
    parts = [(0, 0, 70), (1, 29, 30), (2, 300, 333), (3, 0, 1)]
    s = sequences([last for _, _, last in parts], kv_dtype=kind)
    sinks = torch.randn(6)
    for request, first, _ in parts:
        if first:
            s.run([(request, 0, first)], window)
    batch, q, k, v = s.batch(parts)
    pool = s.pool.clone()
    store_kv(k, v, s.pool[:, 1], batch)
    store_kv_reference(k, v, pool[:, 1], batch)
    assert torch.equal(s.pool.view(torch.uint8), pool.view(torch.uint8))
    found = attention(q, s.pool[:, 1], batch, 0.2, window, sinks)
    wanted = attention_reference(q, pool[:, 1], batch, 0.2, window, sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    alone = s.run([parts[2]], window)
    in_two = torch.cat((s.run([(2, 300, 320)], window), s.run([(2, 320, 333)], window)))
    assert torch.equal(alone, in_two)


@pytest.mark.parametrize(("kind", "pool_dtype"), [("fp8", "auto"), ("int8", "auto"), ("int4", "auto"), ("int4", "fp8")])
def test_quantised_blocks(neoverse: EmulatedLibrary, kind: str, pool_dtype: str) -> None:
    coded = pool_dtype != "auto"
    codec = KVCodec(2, 3, 16, 8, torch.uint8 if coded else torch.float32, kind, pool_dtype)
    block = torch.randn(2, 2, 3, 16 * 8).mul_(torch.exp2(torch.randint(-20, 20, (2, 2, 3, 16 * 8))))
    stored = (encode_blocks(block, 16, pool_dtype) if coded else block).flatten().view(torch.uint8)
    slot, again = torch.zeros(codec.slot_bytes, dtype=torch.uint8), torch.zeros_like(stored)
    for tensor in (stored, slot, again):
        tensor.data_ptr()  # registers the tensor with the emulator
    codec.encode(memoryview(stored.numpy()), memoryview(slot.numpy()))
    assert torch.equal(slot, codec.encode_tensor(stored))
    codec.decode(memoryview(slot.numpy()), memoryview(again.numpy()))
    assert torch.equal(again, codec.decode_tensor(slot))
