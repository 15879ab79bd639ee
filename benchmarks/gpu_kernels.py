"""Speed of each GPU kernel alone: GB/s of the bytes it must move, TFLOP/s of its products.

    python benchmarks/gpu_kernels.py                 # as the engine calls them
    python benchmarks/gpu_kernels.py --tune          # also with other tile sizes
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from spillover.kernels.batch import AttentionBatch
from spillover.kernels.cuda import attention_prefill
from spillover.kernels.triton import activation, draw, gemv, norm, ordered_linear
from spillover.kernels.triton.attention import attention as device
from spillover.kernels.triton.attention import ordered_decode, ordered_prefill, ordered_splits
from spillover.kernels.triton.rope_store import norm_rope_store

ROWS: list[dict[str, Any]] = []


def seconds(run: Callable[[], object], calls: int = 10) -> float:
    """Return the median time of a call, from replays of a graph with `calls` calls, so that launches leave no gaps."""
    run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return sorted(times)[len(times) // 2]


def show(name: str, run: Callable[[], object], nbytes: float = 0, flops: float = 0, **settings: Any) -> float:
    try:
        elapsed = seconds(run)
    except Exception as error:
        print(f"{name:44s} {settings or ''} failed: {str(error)[:200]}", flush=True)
        torch.cuda.synchronize()
        return math.inf
    row = {"kernel": name, **settings, "us": elapsed * 1e6, "gb_per_second": nbytes / elapsed / 1e9,
           "tflop_per_second": flops / elapsed / 1e12}
    ROWS.append(row)
    rates = [f"{row['gb_per_second']:8.0f} GB/s" if nbytes else "", f"{row['tflop_per_second']:7.1f} TFLOP/s" if flops
             else ""]
    print(f"{name:44s} {row['us']:9.1f} us {' '.join(rates)} {settings or ''}", flush=True)
    return elapsed


def batch(counts: list[int], lengths: list[int], heads: int, kv_heads: int, dim: int, block_size: int,
          layers: int = 4, kv_dtype: str = "auto") -> tuple[Tensor, list[Tensor], AttentionBatch]:
    """Return queries, keys and values, the KV of some layers (more than the cache holds), and the batch."""
    width = -(-max(lengths) // block_size)
    blocks = sum(-(-length // block_size) for length in lengths)
    size = block_size * (dim if kv_dtype == "auto" else dim + 4)
    shape = (blocks + 1, layers, 2, kv_heads, size)
    if kv_dtype == "auto":
        pool = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    else:
        pool = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
    order = torch.randperm(blocks).int() + 1
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    first = 0
    for request, length in enumerate(lengths):
        count = -(-length // block_size)
        table[request, :count] = order[first:first + count]
        first += count
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    positions = torch.cat([torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    made = AttentionBatch(*(x.cuda() for x in (starts, torch.tensor(lengths, dtype=torch.int32), table, positions,
                                               rows)), block_size, kv_dtype)
    qkv = torch.randn(sum(counts), heads + 2 * kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    return qkv, [pool[:, layer] for layer in range(layers)], made


def _attention(name: str, qkv: Tensor, views: list[Tensor], made: AttentionBatch, heads: int, window: int | None,
               nbytes: float, flops: float, **settings: Any) -> float:
    """Time attention over one layer after the other."""
    dim = qkv.shape[2]
    sinks = torch.randn(heads, device="cuda") if dim == 64 else None
    worked = replace(made, work=device.make_work(made, heads, views[0].shape[2], dim, window))
    return show(name, partial(_attend, qkv[:, :heads], itertools.cycle(views), worked, window, sinks), nbytes, flops,
                **settings)


def _attend(q: Tensor, views: Iterator[Tensor], worked: AttentionBatch, window: int | None,
            sinks: Tensor | None) -> Tensor:
    return device.attention(q, next(views), worked, 0.1, window, sinks)


DECODES = [  # name, requests, context, heads, kv heads, dim, block size, window, kv dtype
    ("0.6b b256 c800", 256, 800, 16, 8, 128, 16, None, "auto"),
    ("0.6b b256 c800 block 64", 256, 800, 16, 8, 128, 64, None, "auto"),
    ("0.6b b64 c1500", 64, 1500, 16, 8, 128, 16, None, "auto"),
    ("8b b1 c600", 1, 600, 32, 8, 128, 16, None, "auto"),
    ("8b b1 c8192", 1, 8192, 32, 8, 128, 16, None, "auto"),
    ("8b b1 c8192 fp8", 1, 8192, 32, 8, 128, 16, None, "fp8"),
    ("8b b1 c32768", 1, 32768, 32, 8, 128, 16, None, "auto"),
    ("8b b1 c32768 fp8", 1, 32768, 32, 8, 128, 16, None, "fp8"),
    ("8b b256 c800", 256, 800, 32, 8, 128, 16, None, "auto"),
    ("8b b256 c800 fp8", 256, 800, 32, 8, 128, 16, None, "fp8"),
    ("14b b256 c800", 256, 800, 40, 8, 128, 16, None, "auto"),
    ("8b b64 c2048", 64, 2048, 32, 8, 128, 16, None, "auto"),
    ("8b b64 c2048 fp8", 64, 2048, 32, 8, 128, 16, None, "fp8"),
    ("8b b64 c2048 int8", 64, 2048, 32, 8, 128, 16, None, "int8"),
    ("gpt-oss b64 c2048 window", 64, 2048, 64, 8, 64, 16, 128, "auto"),
    ("gpt-oss b1 c2048 full", 1, 2048, 64, 8, 64, 16, None, "auto"),
]


def decode(tune: bool) -> None:
    for name, requests, context, heads, kv_heads, dim, block_size, window, kv_dtype in DECODES:
        rng = np.random.default_rng(0)
        lengths = [context] if requests == 1 else rng.integers(context // 2, context * 3 // 2, requests).tolist()
        layers = max(2, min(8, int(2e8 // (sum(lengths) * 4 * kv_heads * dim)) + 2))
        qkv, views, made = batch([1] * requests, lengths, heads, kv_heads, dim, block_size, layers, kv_dtype)
        seen = [min(length, window or length) for length in lengths]
        nbytes = sum(seen) * 2 * kv_heads * (2 * dim if kv_dtype == "auto" else dim + 4)

        time_it = partial(_attention, f"decode {name}", qkv, views, made, heads, window, nbytes, 0.0)
        time_it()
        if tune and name in ("0.6b b256 c800", "0.6b b64 c1500", "8b b1 c600", "8b b1 c32768"):
            before = ordered_splits.BUSY, ordered_decode.WARPS, ordered_decode.stages
            for busy, warps, stages in [(264, 4, 2), (264, 4, 3), (264, 4, 5), (264, 8, 2), (264, 2, 2), (132, 4, 2),
                                        (528, 4, 2)]:
                ordered_splits.BUSY, ordered_decode.WARPS = busy, warps
                ordered_decode.stages = lambda *_, chosen=stages: chosen
                time_it(busy=busy, warps=warps, stages=stages)
            ordered_splits.BUSY, ordered_decode.WARPS, ordered_decode.stages = before


def prefills(tune: bool) -> None:
    for name, counts, lengths, heads, kv_heads, dim, window, kv_dtype in [
        ("8b 1 x 8192", [8192], [8192], 32, 8, 128, None, "auto"),
        ("8b 8192 after 57344", [8192], [65536], 32, 8, 128, None, "auto"),
        ("8b 1 x 2048", [2048], [2048], 32, 8, 128, None, "auto"),
        ("8b 1 x 512", [512], [512], 32, 8, 128, None, "auto"),
        ("14b 3 x 1024", [1024] * 3, [1024] * 3, 40, 8, 128, None, "auto"),
        ("8b 1 x 8192 fp8", [8192], [8192], 32, 8, 128, None, "fp8"),
        ("0.6b 16 x 512", [512] * 16, [512] * 16, 16, 8, 128, None, "auto"),
        ("0.6b 16 x 512 fp8", [512] * 16, [512] * 16, 16, 8, 128, None, "fp8"),
        ("8b 512 after 7680", [512], [8192], 32, 8, 128, None, "auto"),
        ("gpt-oss 8192 window", [8192], [8192], 64, 8, 64, 128, "auto"),
    ]:
        qkv, views, made = batch(counts, lengths, heads, kv_heads, dim, 16, 2, kv_dtype)
        flops = 0.0
        for count, length in zip(counts, lengths, strict=True):
            for position in range(length - count, length):
                flops += 4 * heads * dim * min(position + 1, window or position + 1)

        time_it = partial(_attention, f"prefill {name}", qkv, views, made, heads, window, 0.0, flops)
        time_it()
        if kv_dtype != "auto" or dim != attention_prefill.DIM:
            continue
        with mock.patch.object(ordered_prefill, "attend_prefill", return_value=False):  # as on other GPUs
            time_it(by="Triton")
            for shape in [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)] if tune else []:
                with mock.patch.object(ordered_prefill, "SMALL", shape):
                    time_it(by="Triton", shape=shape)


LINEARS = [("llama qkv", 6144, 4096), ("llama o", 4096, 4096), ("llama gate_up", 28672, 4096),
           ("llama down", 4096, 14336), ("llama head", 128256, 4096), ("0.6b qkv", 4096, 1024), ("0.6b o", 1024, 2048),
           ("0.6b gate_up", 6144, 1024), ("0.6b down", 1024, 3072), ("0.6b head", 151936, 1024)]


TILES = sorted({tile for tiles in ordered_linear.TILES.values() for tile in tiles} | {ordered_linear.LARGE})


def linears(tune: bool) -> None:
    for name, channels, inner in LINEARS:
        copies = max(1, int(1.5e8 // (channels * inner * 2)))
        weights = [normal(channels, inner) for _ in range(copies)]
        for rows in (1, 4, 16, 64, 128, 256, 512, 2048, 8192):
            if rows > 256 and "head" in name:
                continue
            x = normal(rows, inner)
            product = partial(_product, f"{name} x{rows}", x, weights)
            product("cublas", F.linear)
            product("ordered", ordered_linear.ordered_linear)
            if "gate_up" in name:
                product("cublas, silu", lambda x, w: activation.silu_and_mul(F.linear(x, w)))
                product("ordered silu", ordered_linear.ordered_linear_silu)
            if rows == 1:
                product("gemv", gemv.gemv)
                product("gemv_silu", gemv.gemv_silu)
            expected = ordered_linear.ordered_linear(x, weights[0])
            for tile in TILES if tune else ():
                if tile.rows > 2 * max(rows, 16) or (rows > 512 and (tile.rows < 64 or tile.spread)):
                    continue
                multiply = partial(ordered_linear.ordered_linear, tile=tile)
                if math.isfinite(product("ordered", multiply, tile=tuple(tile))):
                    same = torch.equal(multiply(x, weights[0]), expected)
                    print("" if same else "    ^ DIFFERENT BITS", flush=True)
                    ROWS[-1]["same_bits"] = same


def _product(name: str, x: Tensor, weights: list[Tensor], which: str, call: Callable[..., Tensor],
             **settings: Any) -> float:
    (rows, inner), channels = x.shape, weights[0].shape[0]
    turn = itertools.cycle(weights)
    return show(f"{which} {name}", lambda: call(x, next(turn)), 2 * (channels * inner + rows * (channels + inner)),
                2.0 * rows * channels * inner if rows > 16 else 0, **settings)


def rest() -> None:
    for rows, hidden, inner in ((1, 4096, 14336), (256, 1024, 3072), (8192, 1024, 3072), (8192, 4096, 12288)):
        x, residual, gates = normal(rows, hidden), normal(rows, hidden), normal(rows, 2 * inner)
        show(f"add_rms_norm {rows} x {hidden}", partial(norm.add_rms_norm, x, residual, x[0], 1e-6), rows * hidden * 8)
        show(f"silu_and_mul {rows} x {inner}", partial(activation.silu_and_mul, gates), rows * inner * 6)
    for rows in (1, 256, 8192):
        count = 1 if rows < 512 else 512
        requests = rows // count
        qkv, views, made = batch([count] * requests, [count + 100] * requests, 16, 8, 128, 16, 2)
        cos, weight = torch.randn(2048, 64, device="cuda"), normal(128)
        show(f"norm_rope_store {rows} rows",
             partial(norm_rope_store, qkv, weight, weight, 1e-6, cos, cos, made.positions, made.rows, None,
                     made.block_table, views[0], 16, 16), rows * 128 * 2 * (32 + 32))
    for rows in (1, 32, 256):
        logits = normal(rows, 151936)
        temperature = torch.full((rows,), 0.6, device="cuda")
        uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
        out = torch.empty(rows, dtype=torch.int64, device="cuda")
        show(f"draw {rows} x 151936", partial(draw.draw, logits, temperature, uniform, out), 2 * 2 * logits.numel())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


@click.command()
@click.option("--tune", is_flag=True)
@click.option("--only", default="decode,prefill,linear,rest", show_default=True)
@click.option("--output", default=None, metavar="FILE")
def main(tune: bool, only: str, output: str | None) -> None:
    torch.manual_seed(0)
    start = time.time()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    parts: dict[str, Callable[[], None]] = {"decode": partial(decode, tune), "prefill": partial(prefills, tune),
                                            "rest": rest, "linear": partial(linears, tune)}
    for name, call in parts.items():
        if name in only.split(","):
            call()
            print(f"-- {name}: {time.time() - start:.0f} s", flush=True)
            torch.cuda.empty_cache()
            if output is not None:
                Path(output).write_text(json.dumps(ROWS, indent=1))


if __name__ == "__main__":
    main()
