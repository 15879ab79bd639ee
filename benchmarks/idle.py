"""Share of a decode step in which the GPU is idle, and the cost of batch invariance: steps by default and with --fast.

    python benchmarks/idle.py --model qwen3-8b
    python benchmarks/idle.py --requests 256 --input-len 562 --output-len 128 --name idle-w1-qwen3-0.6b
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

import click
import numpy as np
import torch
from gpu_workload import Figure, opened, options, roofline, run, write
from torch.profiler import ProfilerActivity, profile

from spillover import LLM


@dataclass(frozen=True)
class Load:
    requests: int
    input_len: int
    output_len: int


def generate(llm: LLM, load: Load, seed: int) -> float:
    """Return the seconds of a decode step."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(load.input_len)] for _ in range(load.requests)]
    outputs = run(llm, prompts, [load.output_len] * load.requests, 0.6)
    timings = [output.timings for output in outputs if output.timings is not None]
    first = max(each.first_token for each in timings)
    return (max(each.finished for each in timings) - first) / (load.output_len - 1)


def idle_shares(llm: LLM, load: Load, seed: int) -> list[float]:
    """Return the idle share of each step that only decodes, from the end of one step's draw to the end of the next."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(llm, load, seed)
        torch.cuda.synchronize()
    events = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
                    if event.device_type == torch.autograd.DeviceType.CUDA)
    shares, busy, reached, begun, prefills = [], 0.0, None, None, False
    for start, end, name in events:
        reached = start if reached is None else reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        prefills |= "prefill" in name
        if name.startswith("_pick"):
            if begun is not None and not prefills:
                shares.append(1 - busy / (reached - begun))
            begun, busy, prefills = reached, 0.0, False
    return shares


def step_times(model: str, load: Load, fast: bool, repeats: int) -> tuple[list[float], list[list[float]]]:
    seeds = range(1, repeats + 1)
    with opened(model, max_num_seqs=load.requests, max_model_len=load.input_len + load.output_len,
                enable_prefix_caching=False, fast=fast) as llm:
        generate(llm, load, 0)
        times = [generate(llm, load, seed) for seed in seeds]
        if fast:
            return times, []
        idle_shares(llm, load, 0)  # starts the profiler
        return times, [idle_shares(llm, load, seed) for seed in seeds]


@click.command()
@click.option("--model", default="qwen3-0.6b", show_default=True)
@click.option("--requests", default=128, show_default=True)
@click.option("--input-len", default=512, show_default=True)
@click.option("--output-len", default=64, show_default=True)
@click.option("--name", default=None, help="Name of the result.  [default: idle-MODEL]")
@options()
def main(model: str, requests: int, input_len: int, output_len: int, name: str | None, repeats: int,
         output: str | None) -> None:
    load = Load(requests, input_len, output_len)
    limit = roofline(model).decode(requests, input_len + output_len // 2)
    times, shares = step_times(model, load, False, repeats)
    faster, _ = step_times(model, load, True, repeats)
    p90 = [100 * float(np.quantile(each, 0.9)) for each in shares]
    medians = [100 * float(np.median(each)) for each in shares]
    write(name or f"idle-{model}", [
        Figure("p90 of GPU idle in a decode step", "%", p90, 3.0, True,
               {"medians": medians, "steps": [len(each) for each in shares]}),
        Figure("decode step", "ms", [1e3 * each for each in times], 1e3 * limit.seconds, True),
        Figure("decode step, --fast", "ms", [1e3 * each for each in faster], 1e3 * limit.seconds, True),
    ], output, **asdict(load))


if __name__ == "__main__":
    main()
