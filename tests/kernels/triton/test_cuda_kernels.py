"""A layer by the device's kernels equals the layer by the CPU's, with and without a prefix that is not in the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spillover.kernels.batch import AttentionBatch, LayerShape
from spillover.kernels.cpu_kernels import CpuKernels
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.moe.records import mapped
from spillover.kernels.triton.cuda_kernels import CudaKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, eps=1e-5)
HIDDEN, INNER, BLOCK, LAYER = 32, 48, 8, 3


class Prefix:
    """The first two blocks of a request, outside the pool; the third is in the pool."""

    num_blocks = 2
    length = 19
    addresses = None

    def __init__(self, blocks: Tensor) -> None:
        self.resident = torch.tensor([3], device=blocks.device)
        self._blocks = blocks  # [2, 2, Hk, size]

    def segments(self, layer: int) -> Iterator[Tensor]:
        assert layer == LAYER
        yield self._blocks


def layer_weights(extras: bool) -> dict[str, Any]:
    def linear(rows: int, columns: int) -> Linear:
        return Linear(DENSE, LinearShape((rows,), columns), (torch.randn(rows, columns) * 0.3,))

    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    made: dict[str, Any] = {
        "input_norm": torch.randn(HIDDEN), "mlp_norm": torch.randn(HIDDEN), "qkv": linear(width, HIDDEN),
        "o": linear(HIDDEN, SHAPE.num_heads * SHAPE.head_dim), "gate_up": linear(2 * INNER, HIDDEN),
        "down": linear(HIDDEN, INNER),
    }
    if extras:
        made |= {"qkv_bias": torch.randn(width), "q_norm": torch.randn(SHAPE.head_dim),
                 "k_norm": torch.randn(SHAPE.head_dim), "sinks": torch.randn(SHAPE.num_heads)}
    return made


def moved(batch: AttentionBatch) -> AttentionBatch:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: x.to(DEVICE) for name, x in tensors.items() if isinstance(x, Tensor)})


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_is_that_of_the_cpu(rows: int, offloaded: bool, extras: bool) -> None:
    torch.manual_seed(0)
    w, angles = layer_weights(extras), torch.rand(32, SHAPE.head_dim // 2)
    pool = torch.randn(4, 2, SHAPE.num_kv_heads, BLOCK * SHAPE.head_dim)
    batch = AttentionBatch(
        query_start=torch.tensor([0, rows], dtype=torch.int32), seq_lens=torch.tensor([19], dtype=torch.int32),
        block_table=torch.tensor([[0, 0, 3] if offloaded else [1, 2, 3]], dtype=torch.int32),
        positions=torch.arange(19 - rows, 19), rows=torch.zeros(rows, dtype=torch.int32), block_size=BLOCK,
    )
    x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    there = {name: mapped(weight, lambda tensor: tensor.to(DEVICE)) for name, weight in w.items()}
    on_device = moved(batch)
    pools = pool.clone(), pool.to(DEVICE, copy=True)
    if offloaded:
        batch = replace(batch, offloaded=Prefix(pool[1:3]))
        on_device = replace(on_device, offloaded=Prefix(pool[1:3].to(DEVICE)))
        for each in pools:
            each[1:3] = float("nan")
    cpu = CpuKernels(SHAPE, angles.cos(), angles.sin())
    device = CudaKernels(SHAPE, angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    expected = cpu.attention_block(x.clone(), residual.clone(), w, pools[0], batch, None, LAYER)
    found = device.attention_block(x.to(DEVICE), residual.to(DEVICE), there, pools[1], on_device, None, LAYER)
    for mine, theirs in zip((*found, pools[1][3]), (*expected, pools[0][3]), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-4)
    expected, found = cpu.mlp_block(*expected, w), device.mlp_block(*found, there)
    expected, found = cpu.add_rms_norm(*expected, w["mlp_norm"]), device.add_rms_norm(*found, there["mlp_norm"])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-4)
