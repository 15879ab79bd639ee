"""How long the GPU does nothing in a decode step, and what --deterministic costs: 128 requests.

    python benchmarks/idle.py --model qwen3-8b
"""

from __future__ import annotations

import random

import click
import numpy as np
import torch
from gpu_workload import Figure, opened, options, roofline, run, write
from torch.profiler import ProfilerActivity, profile

from spillover import LLM

REQUESTS, INPUT_LEN, OUTPUT_LEN = 128, 512, 64


def generate(llm: LLM, seed: int) -> float:
    """Seconds of a decode step."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(INPUT_LEN)] for _ in range(REQUESTS)]
    outputs = run(llm, prompts, [OUTPUT_LEN] * REQUESTS, 0.6)
    timings = [output.timings for output in outputs if output.timings is not None]
    first = max(each.first_token for each in timings)
    return (max(each.finished for each in timings) - first) / (OUTPUT_LEN - 1)


def idle_shares(llm: LLM) -> list[float]:
    """Of each step that only decodes: from the end of the last step's draw to the end of its own."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(llm, 1)
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


def step_times(model: str, deterministic: bool, repeats: int) -> tuple[list[float], list[float]]:
    with opened(model, max_num_seqs=REQUESTS, max_model_len=1024, enable_prefix_caching=False,
                deterministic=deterministic) as llm:
        generate(llm, 0)
        times = [generate(llm, seed) for seed in range(1, repeats + 1)]
        return times, [] if deterministic else idle_shares(llm)


@click.command()
@click.option("--model", default="qwen3-0.6b", show_default=True)
@options()
def main(model: str, repeats: int, output: str | None) -> None:
    limit = roofline(model).decode(REQUESTS, INPUT_LEN + OUTPUT_LEN // 2)
    times, shares = step_times(model, False, repeats)
    fixed, _ = step_times(model, True, repeats)
    p90 = float(np.quantile(shares, 0.9))
    print(f"idle: median {np.median(shares):.2%}, p90 {p90:.2%} of {len(shares)} decode steps", flush=True)
    write(f"idle-{model}", [
        Figure("p90 of GPU idle in a decode step", "%", [100 * p90], 3.0, True,
               {"median": 100 * float(np.median(shares)), "steps": len(shares)}),
        Figure("decode step", "ms", [1e3 * each for each in times], 1e3 * limit.seconds, True),
        Figure("decode step, --deterministic", "ms", [1e3 * each for each in fixed], 1e3 * limit.seconds, True),
    ], output)


if __name__ == "__main__":
    main()
