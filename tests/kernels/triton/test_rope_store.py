"""Norms of heads, rotary embedding and the store of keys and values in one kernel equal the separate functions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from spillover.kernels.attention import store_kv_reference
from spillover.kernels.norm import rms_norm_reference
from spillover.kernels.rope import rope_reference
from spillover.kernels.triton import rope_store
from spillover.kernels.triton.rope_store import norm_rope_store
from support.kernels.paged_attention import DEVICE, Case


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope_and_store_in_one(kv_dtype: str, normed: bool) -> None:
    heads, kv_heads, dim = 6, 2, 24
    case = Case([1, 20, 3], [33, 0, 15], heads, kv_heads, dim, 8, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = case.q.shape[0]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE)
    qkv[3, heads] = 0  # a key of zeros has a scale of 0
    weights = [torch.rand(dim, generator=generator).to(DEVICE) + 0.5 for _ in range(2)]
    cos, sin = (torch.randn(64, dim // 2, generator=generator).to(DEVICE) for _ in range(2))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = rms_norm_reference(q, weights[0], 1e-6), rms_norm_reference(k, weights[1], 1e-6)
    q, k = rope_reference(q, k, cos, sin, case.batch.positions)
    expected = case.kv.clone()
    store_kv_reference(k, v, expected, case.batch)
    found = case.kv.clone()
    norm_rope_store(qkv, weights[0] if normed else None, weights[1] if normed else None, 1e-6, cos, sin,
                    case.batch.positions, case.batch.rows, None, case.batch.block_table, found, 8, heads, kv_dtype)
    torch.testing.assert_close(qkv[:, :heads], q)
    if kv_dtype == "auto":
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:  # if the last bit of a sum differs, a code may be the next one
        different = (found != expected).float().mean()
        assert different < 0.01


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_store_writes_the_same_bytes(kv_dtype: str) -> None:
    case = Case([1, 20, 3], [33, 0, 15], 4, 2, 64, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(24, 2, 64, generator=generator).to(DEVICE) for _ in range(2))
    k[0, 1] = 0
    v[2] *= 1e-30
    expected, found = case.kv.clone(), case.kv.clone()
    store_kv_reference(k, v, expected, case.batch)
    qkv, flat = torch.cat((case.q, k, v), dim=1), torch.zeros(64, 32, device=DEVICE)  # angle 0: no rotation
    norm_rope_store(qkv, None, None, 0.0, flat + 1, flat, case.batch.positions, case.batch.rows, None,
                    case.batch.block_table, found, 16, 4, kv_dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_heads_taken_together_have_the_bits_of_heads_alone(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([1, 20, 3], [33, 0, 15], 8, 4, 64, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(3)
    cos, sin = (torch.randn(64, 32, generator=generator).to(DEVICE) for _ in range(2))
    made = torch.randn(24, 16, 64, generator=generator).to(DEVICE)
    weight = torch.rand(64, generator=generator).to(DEVICE)
    found = []
    for many in (1, 10**9):
        monkeypatch.setattr(rope_store, "MANY", many)
        qkv, kv = made.clone(), case.kv.clone()
        norm_rope_store(qkv, weight, weight, 1e-6, cos, sin, case.batch.positions, case.batch.rows, None,
                        case.batch.block_table, kv, 16, 8, kv_dtype)
        found.append((qkv, kv.view(torch.uint8)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
