"""Requests over a small paged pool, for the tests of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spillover.kernels.attention import attention, store_kv
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.kv_quant import head_bytes

NAN = float("nan")


@dataclass
class Sequences:
    """The complete q, k and v of some requests, and their blocks in a pool that holds NaN where nothing was stored."""

    q: list[Tensor]  # one [length, H, D] per request
    k: list[Tensor]
    v: list[Tensor]
    pool: Tensor  # [num_blocks, 2 layers, 2, Hk, block_size * D]
    tables: Tensor  # [B, max_blocks]
    block_size: int
    kv_dtype: str = "auto"

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[AttentionBatch, Tensor, Tensor, Tensor]:
        """Return the batch of (request, first, last) positions, and q, k and v as views of one row buffer."""
        lengths = [last - first for _, first, last in parts]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        requests = [request for request, _, _ in parts]
        batch = AttentionBatch(
            query_start=starts,
            seq_lens=torch.tensor([last for _, _, last in parts], dtype=torch.int32),
            block_table=self.tables[requests],
            positions=torch.cat([torch.arange(first, last) for _, first, last in parts]),
            rows=torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(lengths)).int(),
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
        )
        rows = [torch.cat([x[r][first:last] for r, first, last in parts]) for x in (self.q, self.k, self.v)]
        heads = [x.shape[1] for x in rows]
        buffer = torch.cat([x.flatten(1) for x in rows], dim=1)
        views = buffer.split([h * x.shape[2] for h, x in zip(heads, rows, strict=True)], dim=1)
        q, k, v = (view.view(len(view), h, -1) for view, h in zip(views, heads, strict=True))
        return batch, q, k, v

    def run(self, parts: list[tuple[int, int, int]], window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        batch, q, k, v = self.batch(parts)
        layer = self.pool[:, 1]
        store_kv(k, v, layer, batch)
        return attention(q, layer, batch, 1 / math.sqrt(q.shape[2]), window, sinks)


def sequences(
    lengths: list[int], heads: int = 6, kv_heads: int = 2, dim: int = 32, block_size: int = 16, seed: int = 0,
    kv_dtype: str = "auto",
) -> Sequences:
    generator = torch.Generator().manual_seed(seed)

    def rows(length: int, count: int) -> Tensor:
        return torch.randn(length, count, dim, generator=generator)

    blocks = [-(-length // block_size) for length in lengths]
    if kv_dtype == "auto":
        pool = torch.full((sum(blocks) + 3, 2, 2, kv_heads, block_size * dim), NAN)
    else:  # bytes of 255 are NaN both as fp8 codes and as scales
        shape = (sum(blocks) + 3, 2, 2, kv_heads, head_bytes(block_size, dim))
        pool = torch.full(shape, 255, dtype=torch.uint8)
    order = (torch.randperm(sum(blocks) + 2, generator=generator) + 1).int()  # block 0 is the dummy block
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for request, count in enumerate(blocks):
        tables[request, :count] = order[sum(blocks[:request]) : sum(blocks[: request + 1])]
    return Sequences(
        [rows(n, heads) for n in lengths],
        [rows(n, kv_heads) for n in lengths],
        [rows(n, kv_heads) for n in lengths],
        pool,
        tables,
        block_size,
        kv_dtype,
    )
