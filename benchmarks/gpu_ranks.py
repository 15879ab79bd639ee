"""Ranks on CUDA devices: the time of an all-reduce by size, and its share of a step.

    python benchmarks/gpu_ranks.py --model llama-3.1-8b [--share-device]

Random weights. With --share-device all ranks are on one GPU, where they have no NVLink and compete for its processors:
all-reduces then show the cost of a meeting, and steps show nothing of what several GPUs would gain. Ranks that share a
GPU take turns of 2 ms on it unless the Multi-Process Service (nvidia-cuda-mps-control -d) runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from gpu_workload import RESULTS, opened, options, origin, run

from spillover.engine.parallel.cuda_ranks import CudaRanks

SIZES = (8 << 10, 16 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)  # bytes of a sum; 8 KiB: a row of 4,096 bfloat16
CALLS = 50  # sums in a CUDA graph
REPLAYS = 20


def sums(rank: int, size: int, folder: Path) -> dict[int, float]:
    """Return the microseconds of an all-reduce by bytes, at this rank."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks = CudaRanks(rank, size, folder)
    found = {}
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            ranks.all_reduce(x)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for _ in range(CALLS):
                ranks.all_reduce(x)
            graph.capture_end()
            times = []
            for _ in range(REPLAYS):
                begun = time.perf_counter()
                graph.replay()
                stream.synchronize()
                times.append((time.perf_counter() - begun) / CALLS * 1e6)
        found[nbytes] = statistics.median(times)
    return found


def measure_sums(size: int) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        others = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--ranks", str(size), "--folder",
                                    folder]) for rank in range(1, size)]
        try:
            return sums(0, size, Path(folder))
        finally:
            for other in others:
                other.wait(60)


def decode(model: str, requests: int, length: int, repeats: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens per second of requests that decode together, and the work and waits of ranks per step."""
    prompts, lengths = [[3 + index] * 64 for index in range(requests)], [length] * requests
    with opened(model, max_model_len=1024, max_num_seqs=requests, device="cuda", **flags) as llm:
        run(llm, prompts, lengths, 0.0)
        rates, before = [], llm.stats().ranks
        for _ in range(repeats):
            begun = time.perf_counter()
            run(llm, prompts, lengths, 0.0)
            rates.append(requests * length / (time.perf_counter() - begun))
        after, steps = llm.stats().ranks, repeats * length
    rate = statistics.median(rates)
    waited = (after.seconds - before.seconds) / steps * 1e3
    return {"model": model, "requests": requests, "ranks": after.size, "unit": "tok/s", "value": rate,
            "repeats": rates, "meetings_per_step": (after.calls - before.calls) / steps, "waited_ms_per_step": waited,
            "bytes_per_step": (after.bytes - before.bytes) / steps, "share_waited": waited * rate / requests / 1e3}


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--share-device", is_flag=True, help="Put all ranks on one GPU.")
@click.option("--gpu-memory", default="24GB", show_default=True, help="Device memory of each rank.")
@click.option("--length", default=128, show_default=True)
@click.option("--rank", type=int, hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@options()
def main(model: str, ranks: int, share_device: bool, gpu_memory: str, length: int, rank: int | None,
         folder: Path | None, repeats: int, output: str | None) -> None:
    if rank is not None and folder is not None:
        sums(rank, ranks, folder)
        return
    where = {"one_card": share_device, "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ}
    entries: list[dict[str, Any]] = []
    for nbytes, us in measure_sums(ranks).items():
        print(f"sum of {nbytes // 1024} KiB over {ranks} ranks: {us:.1f} us", flush=True)
        entries.append({"metric": "sum over ranks", "ranks": ranks, "bytes": nbytes, "unit": "us", "value": us})
    several = {"tensor_parallel_size": ranks, "ranks_share_device": share_device}
    for requests in (1, 16):
        for flags in ({}, several, *([{**several, "enforce_eager": True}] if requests == 1 else [])):
            found = decode(model, requests, length, repeats, {"gpu_memory": gpu_memory, **flags})
            found["cuda_graphs"] = "enforce_eager" not in flags
            print(f"{model}, {requests} requests, {found['ranks']} ranks{'' if found['cuda_graphs'] else ', eager'}: "
                  f"{found['value']:.1f} tok/s, {found['meetings_per_step']:.0f} meetings per step, waited "
                  f"{found['waited_ms_per_step']:.2f} ms of it ({found['share_waited']:.0%})", flush=True)
            entries.append(found)
    if output is not None:
        path = RESULTS / "gpu-ranks.json" if output == "results" else Path(output)
        path.write_text(json.dumps([{**entry, **where, **origin()} for entry in entries], indent=2) + "\n")


if __name__ == "__main__":
    main()
