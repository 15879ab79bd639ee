"""Attention over a pool of codes in CUDA C++: the same bits as Triton's kernels, in less time."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spillover.kernels.batch import DecodeScratch
from spillover.kernels.cuda.driver.compiled import Module, module_or_none
from spillover.kernels.triton.attention.ordered_splits import PROGRAMS, TILE_QUERIES, window_piece
from spillover.kernels.triton.launch import pdl_options

NEW_TOKENS, PROMPTS = (Path(__file__).parent / name for name in ("attention.cu", "attention_prompt.cu"))
CAPABILITY, WGMMA_CAPABILITY = (8, 9), (9, 0)  # the lowest that converts FP8; the one with wgmma
WITH_WGMMA = ("attention_prompt.cu", "attention_prefill.cu")  # sources that need wgmma
DIMS = (64, 128)
BLOCKS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
THREADS = 128
QUERIES = 64  # queries of a program for prompts
SHARED = {8: 36 << 10, 16: 38 << 10}  # bytes of shared memory of a program, by the maximum number of its queries
PROMPT_SHARED = 60 << 10
MANY = 1024  # number of programs from which four per multiprocessor are faster than three on an H200


class KernelConfig(NamedTuple):
    """The properties that kernels are compiled for."""

    dim: int
    group: int  # query heads per KV head
    block_size: int
    kv_dtype: str
    dtype: torch.dtype

    @property
    def options(self) -> tuple[str, ...]:
        return (f"-DDIM={self.dim}", f"-DGROUP={self.group}", f"-DBLOCK={self.block_size}",
                f"-DINT8={int(self.kv_dtype == 'int8')}", f"-DBFLOAT16={int(self.dtype is torch.bfloat16)}")


class Product(ctypes.Structure):
    """The argument of the kernels of attention_codes.cuh."""

    _fields_ = (*((name, c_void_p) for name in ("q", "kv", "out", "sums", "stats", "finished", "items", "num_items",
                                                "table", "sinks", "tiles", "query_start", "seq_lens", "slots")),
                *((name, c_int64) for name in ("q_stride", "table_stride", "block_stride", "kv_stride", "head_stride")),
                ("scale", c_float),
                *((name, c_int) for name in ("programs", "kv_heads", "window", "window_piece", "sinks_float")))


def attend_codes(
    q: Tensor, kv_layer: Tensor, out: Tensor, items: Tensor, num_items: Tensor, block_table: Tensor, block_size: int,
    scratch: DecodeScratch, scale: float, window: int | None, sinks: Tensor | None, kv_dtype: str, requests: int,
) -> bool:
    """Compute what `triton.attention.ordered_decode` does; return False and do nothing if no kernel supports it."""
    kv_heads = kv_layer.shape[2]
    rows = next((size for size in SHARED if size * kv_heads >= q.shape[1]), None)
    module = None if rows is None else _module(NEW_TOKENS, q, kv_layer, block_size, kv_dtype)
    if rows is None or module is None:
        return False
    product = _product(q, kv_layer, out, block_table, scale, window, sinks)
    product.programs = min(PROGRAMS, items.shape[0] * kv_heads)
    product.sums, product.stats, product.finished, product.items, product.num_items = (
        x.data_ptr() for x in (scratch.sums, scratch.stats, scratch.finished, items, num_items))
    shared_by = 4 if rows == 8 and requests * kv_heads >= MANY else 3
    module.launch(f"attention_codes_{rows}_{shared_by}", product.programs, THREADS, product, SHARED[rows],
                  pdl_options(q.device)["EARLY"])
    return True


def attend_prompts(
    q: Tensor, kv_layer: Tensor, out: Tensor, tiles: Tensor, query_start: Tensor, seq_lens: Tensor,
    slots: Tensor | None, block_table: Tensor, block_size: int, scale: float, window: int | None,
    sinks: Tensor | None, kv_dtype: str,
) -> bool:
    """Compute what `triton.attention.ordered_prefill` does; return False and do nothing if no kernel supports it."""
    module = _module(PROMPTS, q, kv_layer, block_size, kv_dtype)
    if module is None:
        return False
    product = _product(q, kv_layer, out, block_table, scale, window, sinks)
    product.programs = tiles.shape[0] * (TILE_QUERIES // QUERIES) * q.shape[1]
    product.tiles, product.query_start, product.seq_lens = (x.data_ptr() for x in (tiles, query_start, seq_lens))
    product.slots = None if slots is None else slots.data_ptr()
    module.launch("attention_codes_prompt", product.programs, THREADS, product, PROMPT_SHARED)
    return True


def _module(source: Path, q: Tensor, kv_layer: Tensor, block_size: int, kv_dtype: str) -> Module | None:
    _, heads, dim = q.shape
    if kv_dtype == "auto" or dim not in DIMS or block_size not in BLOCKS or q.dtype not in DTYPES:
        return None
    return kernels(source, KernelConfig(dim, heads // kv_layer.shape[2], block_size, kv_dtype, q.dtype), q.device)


def _product(q: Tensor, kv_layer: Tensor, out: Tensor, block_table: Tensor, scale: float, window: int | None,
             sinks: Tensor | None) -> Product:
    assert q.stride(1) == q.shape[2], "heads of queries lie side by side"
    assert q.data_ptr() % 16 == 0 == q.stride(0) % 8, "queries are read in units of 16 bytes"
    assert kv_layer.data_ptr() % 16 == 0 == kv_layer.stride(0) % 16, "codes are read in units of 16 bytes"
    block_stride, kv_stride, head_stride, _ = kv_layer.stride()
    return Product(
        q=q.data_ptr(), kv=kv_layer.data_ptr(), out=out.data_ptr(), table=block_table.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(), q_stride=q.stride(0), table_stride=block_table.stride(0),
        block_stride=block_stride, kv_stride=kv_stride, head_stride=head_stride, scale=scale,
        kv_heads=kv_layer.shape[2], window=window or 0, window_piece=window_piece(window),
        sinks_float=sinks is not None and sinks.dtype is torch.float32,
    )


@cache
def kernels(source: Path, config: KernelConfig, device: torch.device) -> Module | None:
    """Return the kernels of a source for a config; None if the device is not supported, or, with a line in the log, if
    they cannot be loaded."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY or (source.name in WITH_WGMMA and capability != WGMMA_CAPABILITY):
        return None
    return module_or_none(source, config.options, device, "attention goes through Triton's kernels")
