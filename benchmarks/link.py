"""Rate at which blocks cross the link of a CUDA device, compared with one large copy of pinned memory.

    python benchmarks/link.py --output-json results.json

For each block size, the same bytes are copied to the device and back in calls of n megabytes, from one thread or two,
as the engine copies them: random blocks to random slots, or adjacent ones in order; with one driver call for all blocks
or one each; and while another thread keeps the interpreter busy. A rate is the median over the repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from made_by import made_by

from spillover.kernels.huge_pages import address_of
from spillover.kernels.kv_quant import KVCodec
from spillover.memory.transfer.cuda_driver import CudaPinner, cuda_driver
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_cuda import CudaLink

SLAB = 64 << 20


@dataclass(frozen=True)
class Variant:
    order: str  # "random" | "neighbours"
    megabytes: int  # per call
    threads: int = 1
    batched: bool = True  # one driver call for all blocks
    busy: bool = False  # another thread runs pure Python at the same time


VARIANTS = [
    Variant("random", 32), Variant("random", 64), Variant("random", 256), Variant("neighbours", 64),
    Variant("random", 32, threads=2), Variant("random", 64, threads=2), Variant("random", 64, batched=False),
    Variant("random", 64, busy=True), Variant("random", 64, threads=2, busy=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="MB copied in each direction per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    total = options.megabytes << 20
    limit = large_copies(total, options.repeats)
    print(f"one copy of {options.megabytes} MB: {limit['to_device']:.1f} GB/s to the device, "
          f"{limit['to_host']:.1f} GB/s to the host; pinning {limit['pin_gb_s']:.1f} GB/s")
    stall = pinning_stall()
    print(f"a launch takes {stall['alone_us']:.0f} us, and up to {stall['pinning_us']:.0f} us while {SLAB >> 20} MB "
          f"are pinned")
    rows = []
    for block_bytes in (1 << 19, 1 << 20, 1 << 21, 1 << 22):
        rows += block_copies(block_bytes, total, options.repeats, limit)
    for kind in ("fp8", "int8", "int4"):
        rows += narrow_copies(kind, total, options.repeats)
    result = {
        "large_copy": limit, "launch": stall, "blocks": rows, "batched_calls": cuda_driver().batches,
        **made_by(),
    }
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=2) + "\n")


def large_copies(total: int, repeats: int) -> dict[str, float]:
    pool = HostPool(CudaPinner(0))
    host = torch.frombuffer(pool.allocate(total, "kv"), dtype=torch.uint8)
    device = torch.zeros(total, dtype=torch.uint8, device="cuda")
    start = time.perf_counter()
    assert pool.pin([host.data_ptr()]), "the driver does not pin this much memory"
    pinning = time.perf_counter() - start
    rates = {
        "to_device": rate(total, repeats, lambda: device.copy_(host, non_blocking=True)),
        "to_host": rate(total, repeats, lambda: host.copy_(device, non_blocking=True)),
        "pin_gb_s": total / pinning / 1e9,
    }
    pool.release("kv")
    return rates


def pinning_stall() -> dict[str, float]:
    """Return the longest launch of a small kernel, alone and while another thread pins memory."""
    x = torch.zeros(16, device="cuda")

    def longest(until: Callable[[], bool]) -> float:
        worst = 0.0
        while not until():
            start = time.perf_counter()
            x.add_(1)
            worst = max(worst, time.perf_counter() - start)
        torch.cuda.synchronize()
        return worst * 1e6

    longest(deadline(0.2))
    alone = longest(deadline(0.2))
    pool = HostPool(CudaPinner(0))
    views = [pool.allocate(SLAB, "kv") for _ in range(8)]

    def pin() -> None:
        for view in views:
            pool.pin([address_of(view)])

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    pinning = longest(lambda: not thread.is_alive())
    pool.release("kv")
    return {"alone_us": alone, "pinning_us": pinning}


def deadline(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def block_copies(block_bytes: int, total: int, repeats: int, limit: dict[str, float]) -> list[dict[str, object]]:
    count = total // block_bytes
    pool = torch.zeros(count + 1, block_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    link = CudaLink(pool, CudaTransfers(pool.device))
    slots = []
    for _ in range(0, total, SLAB):
        slab = link.allocate(SLAB)
        slots += [slab[start:start + block_bytes] for start in range(0, SLAB, block_bytes)]
    rng, ids = random.Random(0), list(range(1, count + 1))
    orders = {"random": (rng.sample(ids, count), rng.sample(slots, count)), "neighbours": (ids, slots)}
    rows: list[dict[str, object]] = []
    for variant in VARIANTS:
        blocks, places = orders[variant.order]
        size = max(1, (variant.megabytes << 20) // block_bytes)
        with single_calls(link, not variant.batched), busy_interpreter(variant.busy), \
                ThreadPoolExecutor(variant.threads) as threads:
            rates = {
                "to_host": rate(total, repeats, partial(in_calls, threads, link.copy_out, blocks, places, size)),
                "to_device": rate(total, repeats, partial(in_calls, threads, link.copy_in, places, blocks, size)),
            }
        rows.append({"block_bytes": block_bytes, **dataclasses.asdict(variant)} | {
            f"{way}_{what}": value for way, gb_s in rates.items()
            for what, value in (("gb_s", gb_s), ("share", gb_s / limit[way]))
        })
        print(f"{block_bytes / 2**20:4.1f} MB blocks, {describe(variant):52} {rates['to_device']:6.1f} GB/s in "
              f"({rates['to_device'] / limit['to_device']:4.0%}) {rates['to_host']:6.1f} GB/s out "
              f"({rates['to_host'] / limit['to_host']:4.0%})", flush=True)
    link.close()
    return rows


def narrow_copies(kind: str, total: int, repeats: int) -> list[dict[str, object]]:
    """Measure 2 MB blocks of Llama-3.1-8B that are encoded and decoded on the way; rates count bytes on the device."""
    codec = KVCodec(32, 8, 16, 128, torch.bfloat16, kind)
    count = total // codec.block_bytes
    pool = torch.randn(count + 1, 32, 2, 8, 16 * 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    link = CudaLink(pool, CudaTransfers(pool.device), codec)
    slots = [link.allocate(codec.slot_bytes) for _ in range(count)]
    blocks, size = list(range(1, count + 1)), (64 << 20) // codec.block_bytes
    rows: list[dict[str, object]] = []
    for threads_count in (1, 2):
        with ThreadPoolExecutor(threads_count) as threads:
            out = rate(total, repeats, partial(in_calls, threads, link.copy_out, blocks, slots, size))
            back = rate(total, repeats, partial(in_calls, threads, link.copy_in, slots, blocks, size))
        rows.append({"block_bytes": codec.block_bytes, "slot_bytes": codec.slot_bytes, "codec": kind,
                     "threads": threads_count, "to_device_gb_s": back, "to_host_gb_s": out})
        print(f"{kind:4} on the way, {threads_count} threads: {back:.1f} GB/s in, {out:.1f} GB/s out", flush=True)
    link.close()
    return rows


def describe(variant: Variant) -> str:
    parts = [variant.order, f"{variant.megabytes} MB per call"]
    parts += ["two threads"] * (variant.threads == 2)
    parts += ["one driver call per block"] * (not variant.batched)
    parts += ["interpreter busy"] * variant.busy
    return ", ".join(parts)


def in_calls(threads: ThreadPoolExecutor, copy: Callable[..., None], sources: list[Any], targets: list[Any],
             size: int) -> None:
    calls = [threads.submit(copy, sources[start:start + size], targets[start:start + size])
             for start in range(0, len(sources), size)]
    for call in calls:
        call.result()


def rate(nbytes: int, repeats: int, move: Callable[[], object]) -> float:
    """Return the median GB/s, without the first call."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        move()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times[1:]) / 1e9


@contextmanager
def single_calls(link: CudaLink, wanted: bool) -> Iterator[None]:
    table = link._transfers._table
    batch = table.copy_batch
    if wanted:
        table.copy_batch = None
    try:
        yield
    finally:
        table.copy_batch = batch


@contextmanager
def busy_interpreter(wanted: bool) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while wanted and not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
