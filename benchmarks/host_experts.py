"""Speed of the host's cores at computing experts, compared with the rate at which they read memory.

    python benchmarks/host_experts.py --threads 1,2

Experts of gpt-oss-120b (MXFP4) and Qwen3-30B-A3B (FP8, bfloat16) with random weights, --gigabytes of them, used in turn
so that few are found in a cache. A call computes as many experts of one layer as one token is routed to, each with the
same number of rows. Rates count the bytes of the experts' weights once per call; microseconds are those of one expert.
A rate is the median over the calls, followed by the maximum, which other processes affect less. Memory is read by
torch, as in `spill doctor`; a percentage compares median with median, or maximum with maximum.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator

import click
import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.fp8_block import FP8_BLOCK
from spillover.kernels.formats.mxfp4 import MXFP4
from spillover.kernels.moe.host_experts import TILE_ROWS, ExpertLayout, HostExperts, available_cores

MODELS = {
    "gpt-oss-120b mxfp4": (ExpertLayout.packed(MXFP4, torch.bfloat16, 2880, 2880, 128, 7.0, biased=True), 4),
    "Qwen3-30B-A3B fp8": (ExpertLayout.packed(FP8_BLOCK, torch.bfloat16, 2048, 768, 128), 8),
    "Qwen3-30B-A3B bfloat16": (ExpertLayout.packed(DENSE, torch.bfloat16, 2048, 768, 128), 8),
}


def memory(nbytes: int) -> Tensor:
    """Allocate memory, in huge pages if the system provides them."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def fill(layout: ExpertLayout, run: Tensor) -> Tensor:
    """Return records [layers, experts, record_bytes] in `run`, all with the same random weights of one expert."""
    one = torch.zeros(1, layout.record.nbytes, dtype=torch.uint8)
    for stack in layout.stacks(one):
        if stack.scales is None:
            stack.values.copy_(torch.randn(stack.values.shape) * stack.width**-0.5)
        elif stack.weight.format == FP8_BLOCK:
            stack.values.copy_(torch.randn(stack.values.shape).to(torch.float8_e4m3fn))
            stack.scales.copy_(torch.rand(stack.scales.shape) * stack.width**-0.5)
        else:
            stack.values.random_(0, 256)
            stack.scales.random_(117, 123)
        if stack.bias is not None:
            stack.bias.copy_(torch.randn(stack.bias.shape))
    size = layout.experts * layout.record.nbytes
    layers = max(1, len(run) // size)
    records = run[: layers * size].view(-1, layout.record.nbytes)
    records.copy_(one.expand_as(records))
    return records.view(layers, layout.experts, -1)


def requests(layers: int, experts: int, k: int, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, pairs) endlessly: each time the k experts that were used longest ago."""
    while True:
        for first in range(0, experts - k + 1, k):
            for layer in range(layers):
                pairs = [[t, first + j, t * k + j, 0] for t in range(rows) for j in range(k)]
                yield layer, torch.tensor(pairs, dtype=torch.int32)


def product_rate(
    layout: ExpertLayout, records: Tensor, k: int, rows: int, threads: int, seconds: float, tile_rows: int
) -> tuple[float, float]:
    """Return the bytes of experts computed per second, median and maximum."""
    x = torch.randn(rows, layout.hidden).to(layout.dtype).float()
    rates = []
    with HostExperts(layout, [layer.data_ptr() for layer in records], threads, tile_rows=tile_rows) as experts:
        end = time.perf_counter() + seconds
        for layer, pairs in requests(len(records), layout.experts, k, rows):
            start = time.perf_counter()
            experts.run(layer, x, pairs)
            rates.append(k * layout.record.nbytes / (time.perf_counter() - start))
            if time.perf_counter() > end and len(rates) > 3:
                return statistics.median(rates), max(rates)
    raise AssertionError


def read_rate(data: Tensor, threads: int, seconds: float) -> tuple[float, float]:
    """Return the bytes per second that torch reads, median and maximum, by a reduction or a matrix-vector product,
    whichever is faster. A reading takes about as long as a call of experts, so that the maxima are comparable."""
    floats = data[: len(data) // (1 << 26) * (1 << 26)].view(torch.float32).view(-1, 1 << 10, 1 << 14)
    vector, out = torch.zeros(1 << 14), torch.empty(1 << 10)

    def product(part: Tensor) -> None:
        torch.mv(part, vector, out=out)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(timed(floats, call, seconds / 2) for call in (product, torch.sum))
    finally:
        torch.set_num_threads(before)


def timed(parts: Tensor, call: Callable[[Tensor], object], seconds: float) -> tuple[float, float]:
    rates, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        for part in parts:
            start = time.perf_counter()
            call(part)
            rates.append(part.nbytes / (time.perf_counter() - start))
    return statistics.median(rates), max(rates)


@click.command()
@click.option("--threads", default=None, help="Numbers of threads, separated by commas; default: all cores.")
@click.option("--rows", default="1,2,4,6,8,16", help="Numbers of rows per expert, separated by commas.")
@click.option("--tile-rows", default=TILE_ROWS, help="Rows from which tiles are used, if available; 0: never.")
@click.option("--gigabytes", default=2.0, help="Size of each model's weights.")
@click.option("--seconds", default=2.0, help="Duration of each measurement.")
def main(threads: str | None, rows: str, tile_rows: int, gigabytes: float, seconds: float) -> None:
    counts = [int(each) for each in threads.split(",")] if threads else [available_cores()]
    run = memory(int(gigabytes * 1e9))
    run.random_(0, 2)
    reads = {count: read_rate(run, count, seconds) for count in counts}
    print(native.describe())
    print(f"{'':24}{'threads':>8}{'rows':>6}{'us':>8}{'GB/s':>8}{'memory':>8}{'percent':>9}{'best':>8}{'percent':>9}")
    for name, (layout, k) in MODELS.items():
        records = fill(layout, run)
        for count in counts:
            for each in (int(each) for each in rows.split(",")):
                rate, best = product_rate(layout, records, k, each, count, seconds, tile_rows)
                roof, top = reads[count]
                print(f"{name:24}{count:8}{each:6}{layout.record.nbytes / rate * 1e6:8.0f}{rate / 1e9:8.1f}"
                      f"{roof / 1e9:8.1f}{100 * rate / roof:9.0f}{best / 1e9:8.1f}{100 * best / top:9.0f}")


if __name__ == "__main__":
    main()
