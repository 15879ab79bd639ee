"""Attention of a few requests with one new token each, with the norms, rotary embedding and store of KV before it, in
one kernel: the same bits as Triton's kernels, in less time."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from spillover.kernels.batch import AttentionBatch
from spillover.kernels.cuda.attention import BLOCKS, DTYPES, KernelConfig, kernels
from spillover.kernels.triton.attention.ordered_splits import PROGRAMS, window_piece
from spillover.kernels.triton.launch import pdl_options

SOURCE = Path(__file__).parent / "attention_few.cu"
REQUESTS = 2  # maximum number of requests: with more, programs hide each other's latency
DIMS = (64, 128, 256)
THREADS, ROUND = 256, 128  # threads of a program, keys of a round
MOST_GROUP = 16  # maximum number of query heads that share a KV head


class Product(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (*((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "cos", "sin", "kv", "out", "sums", "stats",
                                                "finished", "items", "num_items", "table", "sinks")),
                *((name, c_int64) for name in ("row_stride", "table_stride", "block_stride", "kv_stride",
                                               "head_stride")),
                ("scale", c_float), ("eps", c_float),
                *((name, c_int) for name in ("kv_heads", "window_piece", "sinks_float")))


def shared_bytes(dim: int, group: int) -> int:
    """Return the bytes of shared memory of a program: rounds of keys and values, weights, and sums of warps."""
    rounds, rows = 2 if dim <= 128 else 1, -(-group // 8) * 8
    return rounds * ROUND * dim * 4 + rows * (2 * (ROUND + 8) + 2 * 4 * THREADS // 32) + 128


def attend_few(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Norm, rotate, store keys and values, and attend, for qkv [T, H + 2 Hk, D] of requests with one new token each ->
    [T, H, D]. Return None and do nothing if no kernel supports it."""
    work, (rows, _, dim), kv_heads = batch.work, qkv.shape, kv_layer.shape[2]
    group = num_heads // kv_heads
    if not (rows <= REQUESTS and batch.offloaded is None and work is not None and work.splits is not None
            and work.tiles is None and work.short is None and batch.kv_dtype == "auto" and qkv.dtype in DTYPES
            and dim in DIMS and batch.block_size in BLOCKS and group <= MOST_GROUP
            and work.splits.shape[0] * kv_heads <= PROGRAMS):
        return None
    module = kernels(SOURCE, KernelConfig(dim, group, batch.block_size, batch.kv_dtype, qkv.dtype), qkv.device)
    shared = shared_bytes(dim, group)
    if module is None or shared > module.shared:
        return None
    assert work.num_splits is not None
    assert work.scratch is not None
    assert qkv.stride(1) == dim
    assert qkv.data_ptr() % 16 == 0 == qkv.stride(0) % 8, "queries, keys and values are read in units of 16 bytes"
    assert kv_layer.data_ptr() % 16 == 0 == kv_layer.stride(0) % 8, "the pool is read in units of 16 bytes"
    assert cos.dtype is sin.dtype is torch.float32
    assert q_norm is None or q_norm.dtype is qkv.dtype
    out, scratch = torch.empty(rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device), work.scratch
    block_stride, kv_stride, head_stride, _ = kv_layer.stride()
    product = Product(
        qkv=qkv.data_ptr(), q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
        kv=kv_layer.data_ptr(), out=out.data_ptr(), sums=scratch.sums.data_ptr(), stats=scratch.stats.data_ptr(),
        finished=scratch.finished.data_ptr(), items=work.splits.data_ptr(), num_items=work.num_splits.data_ptr(),
        table=batch.block_table.data_ptr(), sinks=None if sinks is None else sinks.data_ptr(),
        row_stride=qkv.stride(0), table_stride=batch.block_table.stride(0), block_stride=block_stride,
        kv_stride=kv_stride, head_stride=head_stride, scale=scale, eps=eps, kv_heads=kv_heads,
        window_piece=window_piece(window), sinks_float=sinks is not None and sinks.dtype is torch.float32,
    )
    module.launch("attention_few", work.splits.shape[0] * kv_heads, THREADS, product, shared,
                  pdl_options(qkv.device)["EARLY"])
    return out
