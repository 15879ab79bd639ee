"""Rotation equals the reference, on plain tensors and on views into one row buffer."""

import pytest
import torch

from spillover.kernels.rope import rope, rope_reference


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (1, 1, 8), (4, 2, 96), (2, 2, 6)])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_rotation_is_the_reference(rows: int, heads: int, kv_heads: int, dim: int) -> None:
    angles = torch.rand(300, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 300, (rows,))
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    values = qkv[:, (heads + kv_heads) * dim :].clone()
    q = qkv[:, : heads * dim].view(rows, heads, dim)
    k = qkv[:, heads * dim : (heads + kv_heads) * dim].view(rows, kv_heads, dim)
    wanted = rope_reference(q.clone(), k.clone(), cos, sin, positions)
    got = rope(q, k, cos, sin, positions)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(qkv[:, (heads + kv_heads) * dim :], values)
