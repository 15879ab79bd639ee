"""Random batches over a paged KV pool, for attention kernels on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from spillover.kernels.attention import attention_reference, store_kv_reference
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.kv_quant import head_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply matrices in bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


class Case:
    """A random batch over a pool that holds NaN where nothing was stored."""

    def __init__(self, counts: list[int], cached: list[int], heads: int = 4, kv_heads: int = 2, dim: int = 32,
                 block_size: int = 16, dtype: torch.dtype = torch.float32, kv_dtype: str = "auto", seed: int = 0,
                 window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [a + b for a, b in zip(counts, cached, strict=True)]
        width = -(-max(lengths) // block_size)
        blocks = len(counts) * width + 1
        size = block_size * dim if kv_dtype == "auto" else head_bytes(block_size, dim)
        shape = (blocks, 2, 2, kv_heads, size)
        pool = (torch.full(shape, float("nan"), dtype=dtype) if kv_dtype == "auto"
                else torch.full(shape, 255, dtype=torch.uint8))
        order = torch.randperm(blocks - 1, generator=generator).int() + 1
        table = order.view(len(counts), width)
        self.kv = pool.to(DEVICE)[:, 1]
        self.scale, self.window, self.heads, self.dim = 1 / math.sqrt(dim), window, heads, dim
        self.batch = self._batch(counts, cached, table, block_size, kv_dtype)
        whole = self._batch(lengths, [0] * len(counts), table, block_size, kv_dtype)
        k, v = (torch.randn(sum(lengths), kv_heads, dim, generator=generator).to(DEVICE, dtype) for _ in range(2))
        store_kv_reference(k, v, self.kv, whole)
        self.q = torch.randn(sum(counts), heads, dim, generator=generator).to(DEVICE, dtype)
        self.sinks = torch.randn(heads, generator=generator).to(DEVICE)

    @staticmethod
    def _batch(counts: list[int], cached: list[int], table: Tensor, block_size: int, kv_dtype: str) -> AttentionBatch:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([a + b for a, b in zip(counts, cached, strict=True)], dtype=torch.int32)
        positions = torch.cat([torch.arange(b, a + b) for a, b in zip(counts, cached, strict=True)])
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
        return AttentionBatch(*(x.to(DEVICE) for x in (starts, lengths, table, positions, rows)), block_size,
                              kv_dtype)

    def expected(self, sinks: bool = False) -> Tensor:
        return attention_reference(self.q.float(), self.kv, self.batch, self.scale, self.window,
                                   self.sinks if sinks else None)

    def found(self, sinks: bool = False) -> Tensor:
        return self.attend(self.q, self.batch, sinks)

    def attend(self, q: Tensor, batch: AttentionBatch, sinks: bool = False) -> Tensor:
        from spillover.kernels.triton.attention.attention import attention, make_work

        if batch.work is None:
            batch = replace(batch, work=make_work(batch, self.heads, self.kv.shape[2], self.dim, self.window))
        return attention(q, self.kv, batch, self.scale, self.window, self.sinks if sinks else None)

    def part(self, request: int, first: int, last: int) -> tuple[Tensor, AttentionBatch]:
        """Return some of a request's rows, and a batch that contains only them."""
        start, length = int(self.batch.query_start[request]), int(self.batch.seq_lens[request])
        count = int(self.batch.query_start[request + 1]) - start
        rows = slice(start + first, start + last)
        return self.q[rows], replace(
            self.batch, query_start=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor([length - count + last], dtype=torch.int32, device=DEVICE),
            block_table=self.batch.block_table[request:request + 1], positions=self.batch.positions[rows],
            rows=torch.zeros(last - first, dtype=torch.int32, device=DEVICE))


def error(found: Tensor, expected: Tensor) -> float:
    assert not found.isnan().any()
    return float((found.float() - expected).norm() / expected.norm())
