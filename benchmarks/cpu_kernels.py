"""The native CPU kernels compared with torch's, on the shapes of SmolLM2-135M: `python benchmarks/cpu_kernels.py`.

Products run over all of the model's weights and attention over the blocks of all layers, so that little stays in the
CPU's cache. A time is the sum of each call's minimum over many repeats, so that other processes affect it less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from spillover.kernels import native
from spillover.kernels.activation import silu_and_mul
from spillover.kernels.attention import attention, store_kv
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.extents import CODE_BLOCK
from spillover.kernels.formats.gguf_codes import CODE_FORMS, Codes, pack_codes
from spillover.kernels.formats.packed import pack
from spillover.kernels.linear import linear
from spillover.kernels.norm import add_rms_norm
from spillover.kernels.rope import rope

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB, BLOCK = 30, 576, 9, 3, 64, 1536, 49152, 16
SHAPES = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP)]  # [N, K]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds spent on each measurement")
    seconds = parser.parse_args().seconds
    print(native.describe(), f"({torch.get_num_threads()} threads)")
    products(seconds)
    coded_products(seconds)
    attentions(seconds)
    small(seconds)


def products(seconds: float) -> None:
    plain = [torch.randn(shape) * 0.02 for _ in range(LAYERS) for shape in SHAPES] + [torch.randn(VOCAB, HIDDEN)]
    packed = [pack(weight) for weight in plain]
    size = sum(weight.nbytes for weight in plain)
    print(
        f"\nlinear over {size / 1e6:.0f} MB of weights\n{'rows':>6}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}{'torch ms':>10}"
    )
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        x = {k: torch.randn(rows, k) for k in (HIDDEN, MLP)}
        ours = least([partial(linear, x[w.shape[1]], w) for w in packed], seconds)
        theirs = least([partial(F.linear, x[w.shape[1]], w) for w in plain], seconds)
        flops = 2 * rows * size / 4
        print(f"{rows:6}{ours * 1e3:9.1f}{size / ours / 1e9:8.1f}{flops / ours / 1e9:9.0f}{theirs * 1e3:10.1f}")


def coded_products(seconds: float) -> None:
    """Time products with weights in the codes of each type of GGUF file."""
    if not native.multiplies_codes():
        return
    count, size = 24, 2048
    values = torch.randint(0, 16, (size, size), dtype=torch.uint8)
    big = torch.ones(1 << 27)
    read = big.nbytes / least([partial(torch.sum, big)], seconds) / 1e9
    print(f"\nlinear over {count} matrices of {size} x {size} in codes; memory is read at {read:.1f} GB/s\n{'type':>8}"
          f"{'MB':>6}" + "".join(f"{f'{rows} rows, ms':>13}{'GB/s':>7}" for rows in (1, 4, 16)))
    for name, form in CODE_FORMS.items():
        numbers = [tuple(torch.ones(size, size // every).to(getattr(torch, kind)) for kind in kinds)
                   for kinds, every in ((form.block, CODE_BLOCK), (form.head, form.unit))]
        packed = pack_codes([Codes(form, values.view(torch.int8) if form.bits == 8 else values, *numbers)])
        weights = [packed.map(torch.clone) for _ in range(count)]
        line = f"{name:>8}{packed.nbytes * count / 1e6:6.0f}"
        for rows in (1, 4, 16):
            took = least([partial(linear, torch.randn(rows, size), weight) for weight in weights], seconds)
            line += f"{took * 1e3:13.2f}{packed.nbytes * count / took / 1e9:7.1f}"
        print(line)


def attentions(seconds: float) -> None:
    print(f"\nattention over {LAYERS} layers\n{'batch':>6}{'query':>7}{'context':>9}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}")
    for requests, queries, context in (
        (1, 1, 256),
        (1, 1, 2048),
        (16, 1, 1024),
        (64, 1, 256),
        (1, 256, 256),
        (1, 256, 2048),
    ):
        batch, pool = contexts(requests, queries, context)
        q = torch.randn(requests * queries, HEADS, DIM)
        took = least([partial(attention, q, pool[:, i], batch, 0.125) for i in range(LAYERS)], seconds)
        size = requests * context * 2 * KV_HEADS * DIM * 4 * LAYERS
        seen = requests * queries * (context - (queries - 1) / 2)
        flops = 4 * seen * HEADS * DIM * LAYERS
        rates = f"{took * 1e3:9.2f}{size / took / 1e9:8.1f}{flops / took / 1e9:9.1f}"
        print(f"{requests:6}{queries:7}{context:9}{rates}")


def small(seconds: float) -> None:
    print(f"\nothers, us per call\n{'rows':>6}{'add_rms_norm':>14}{'silu_and_mul':>14}{'rope':>8}{'store_kv':>10}")
    angles = torch.rand(2048, DIM // 2)
    for rows in (1, 16, 256):
        x, gate_up = torch.randn(rows, HIDDEN), torch.randn(rows, 2 * MLP)
        qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        batch, pool = contexts(rows, 1, 100) if rows < 100 else contexts(1, rows, rows)
        weight = torch.randn(HIDDEN)
        times = (
            least([partial(add_rms_norm, x, x, weight, 1e-5)], seconds / 4),
            least([partial(silu_and_mul, gate_up)], seconds / 4),
            least([partial(rope, q, k, angles.cos(), angles.sin(), batch.positions)], seconds / 4),
            least([partial(store_kv, k, v, pool[:, 0], batch)], seconds / 4),
        )
        print(f"{rows:6}" + "".join(f"{t * 1e6:{w}.1f}" for t, w in zip(times, (14, 14, 8, 10), strict=True)))


def contexts(requests: int, queries: int, context: int) -> tuple[AttentionBatch, torch.Tensor]:
    """Return a batch of requests with `context` cached tokens each, the last `queries` new, in shuffled blocks."""
    blocks = -(-context // BLOCK)
    pool = torch.randn(1 + requests * blocks, LAYERS, 2, KV_HEADS, BLOCK * DIM)
    batch = AttentionBatch(
        query_start=torch.arange(0, requests * queries + 1, queries, dtype=torch.int32),
        seq_lens=torch.full((requests,), context, dtype=torch.int32),
        block_table=(torch.randperm(requests * blocks) + 1).int().view(requests, blocks),
        positions=torch.arange(context - queries, context).repeat(requests),
        rows=torch.arange(requests, dtype=torch.int32).repeat_interleave(queries),
        block_size=BLOCK,
    )
    return batch, pool


def least(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or best[-1] == float("inf"):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return sum(best)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
