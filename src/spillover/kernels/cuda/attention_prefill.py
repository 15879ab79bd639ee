"""Attention of prompts over 16-bit keys and values in CUDA C++: the same bits as Triton's kernel, in less time."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from spillover.kernels.cuda.attention import BLOCKS, DTYPES, KernelConfig, kernels
from spillover.kernels.cuda.driver.tensor_map import TYPES, Map, tensor_map
from spillover.kernels.triton.attention.ordered_splits import TILE, TILE_QUERIES, window_piece

SOURCE = Path(__file__).parent / "attention_prefill.cu"
THREADS, STAGES = 384, 4
DIM = 128  # head dimension: with smaller ones exponentials take longer than products, and Triton has more programs
SHARED = (TILE_QUERIES + STAGES * 2 * TILE) * DIM * 2 + 1024  # bytes of queries, tiles of keys and values, and barriers


class Product(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (("kv", Map),
                *((name, c_void_p) for name in ("q", "out", "table", "sinks", "tiles", "query_start", "seq_lens",
                                                "slots")),
                ("q_stride", c_int64), ("table_stride", c_int64),
                *((name, c_int) for name in ("block_rows", "kv_rows", "head_rows")), ("scale", c_float),
                *((name, c_int) for name in ("programs", "kv_heads", "window", "window_piece", "sinks_float")))


def attend_prefill(
    q: Tensor, kv_layer: Tensor, out: Tensor, tiles: Tensor, query_start: Tensor, seq_lens: Tensor,
    slots: Tensor | None, block_table: Tensor, block_size: int, scale: float, window: int | None,
    sinks: Tensor | None, kv_dtype: str,
) -> bool:
    """Compute what `triton.attention.ordered_prefill` does; return False and do nothing if no kernel supports it."""
    (_, heads, dim), (blocks, _, kv_heads, _), strides = q.shape, kv_layer.shape, kv_layer.stride()
    programs = tiles.shape[0] * heads
    if (kv_dtype != "auto" or dim != DIM or block_size not in BLOCKS or q.dtype not in DTYPES
            or kv_layer.dtype is not q.dtype):
        return False
    module = kernels(SOURCE, KernelConfig(dim, heads // kv_heads, block_size, kv_dtype, q.dtype), q.device)
    if module is None or module.shared < SHARED:
        return False
    assert q.stride(1) == dim, "heads of queries lie side by side"
    assert q.data_ptr() % 16 == 0 == q.stride(0) % 8, "queries are read in units of 16 bytes"
    assert kv_layer.data_ptr() % 16 == 0 == sum(stride % dim for stride in strides[:3]), "the pool is rows of a head"
    pool = tensor_map(kv_layer.data_ptr(), TYPES[q.dtype], (dim, blocks * strides[0] // dim), (2 * dim,),
                      (64, min(block_size, TILE)))
    product = Product(
        kv=pool, q=q.data_ptr(), out=out.data_ptr(), table=block_table.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(), tiles=tiles.data_ptr(),
        query_start=query_start.data_ptr(), seq_lens=seq_lens.data_ptr(),
        slots=None if slots is None else slots.data_ptr(), q_stride=q.stride(0), table_stride=block_table.stride(0),
        block_rows=strides[0] // dim, kv_rows=strides[1] // dim, head_rows=strides[2] // dim, scale=scale,
        programs=programs, kv_heads=kv_heads, window=window or 0, window_piece=window_piece(window),
        sinks_float=sinks is not None and sinks.dtype is torch.float32,
    )
    module.launch("attention_prefill", programs, THREADS, product, SHARED)
    return True
