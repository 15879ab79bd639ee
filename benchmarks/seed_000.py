"""A hundred concurrent requests to a mixture of which half of the experts' bytes fit: four ways to hold its weights.

    python benchmarks/seed_000.py --output results

Compares static offload (a share of the weights stays in host memory and is copied at use), copies on demand, sequential
prefetch, and paged experts with the host's help. Steps have up to 8,192 tokens; those of arms that end in -16k or -32k
up to that many. Lengths are drawn to resemble ShareGPT's (log-normal, about 230 tokens on average); answers are cut to
--output-len tokens. Weights are random, of the true shapes, and their router uses fewer experts than a real one would:
an advantage for `demand`, which copies only those, and for the host, which computes only those.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from typing import Any

import click
import numpy as np
import torch
from big_models import half_budget
from gpu_workload import MODELS, Figure, opened, write

from spillover import SamplingParams
from spillover.memory.transfer.host_pool import HostPool
from spillover.models.registry import architecture
from spillover.plan.shapes import model_shape

REQUESTS = 100
ARMS = ("static-offload", "demand", "sequential", "experts", "static-offload-16k", "experts-16k", "static-offload-32k",
        "experts-32k")
TOKENS = {"8k": 8192, "16k": 16384, "32k": 32768}


def lengths(seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(4.9, 1.05, REQUESTS)
    return [int(each) for each in drawn.clip(4, 1024)]


def split(arm: str) -> tuple[str, int]:
    """Return the strategy of an arm, and the maximum number of tokens of its steps."""
    for name, tokens in TOKENS.items():
        if arm.endswith(f"-{name}"):
            return arm.removesuffix(f"-{name}"), tokens
    return arm, TOKENS["8k"]


def serve(model: str, arm: str, budget: int, offload: float, output_len: int, repeats: int) -> dict[str, list[float]]:
    strategy, tokens = split(arm)
    flags: dict[str, Any] = {"weights": strategy}
    if strategy == "static-offload":
        # cpu_offload_gb sets what stays on the device; a larger budget ensures that everything else has enough memory.
        flags, budget = {"cpu_offload_gb": offload}, budget + (6 << 30)
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "peak": []}
    gc.collect()  # frees the model measured before
    before = torch.cuda.memory_allocated()
    with opened(model, max_num_seqs=REQUESTS, max_model_len=2048, enable_prefix_caching=False,
                max_num_batched_tokens=tokens, gpu_memory=str(budget), **flags) as llm:
        torch.cuda.reset_peak_memory_stats()  # excludes the buffers that planning used to measure the machine
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        rng = np.random.default_rng(1)
        for turn in range(repeats + 1):
            prompts = [rng.integers(1000, 100_000, length).tolist() for length in lengths(0)]
            if turn == 0:  # compiles kernels and captures graphs
                warm = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
                llm.generate(prompts, warm, use_tqdm=False)
                continue
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            timings = [output.timings for output in outputs if output.timings is not None]
            found["ttft"].append(1e3 * statistics.mean(each.first_token - each.arrived for each in timings))
            found["tpot"].append(1e3 * statistics.mean((each.finished - each.first_token) / (output_len - 1)
                                                       for each in timings))
            print(f"{arm}: TTFT {found['ttft'][-1]:.0f} ms, TPOT {found['tpot'][-1]:.1f} ms, "
                  f"{time.perf_counter() - start:.1f} s", flush=True)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{arm}: peak device memory {peak / 1e9:.2f} GB, budget {budget / 1e9:.2f} GB", flush=True)
    if peak > budget:
        raise SystemExit(f"peak device memory {peak:,} is above the budget {budget:,}")
    found["peak"].append(peak)
    return found


@click.command()
@click.option("--model", default="qwen3-30b-a3b-fp8", show_default=True)
@click.option("--arms", default=",".join(ARMS), show_default=True)
@click.option("--output-len", default=24, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--output", default=None)
def main(model: str, arms: str, output_len: int, repeats: int, output: str | None) -> None:
    logging.basicConfig(level=logging.INFO)  # shows the engine's measurements and decisions
    HostPool.keeps = True
    built = architecture(MODELS[model])
    config = built.config(MODELS[model])
    shape = model_shape(config, built.weight_specs(config), "bfloat16")
    half = shape.expert_bytes * shape.num_experts * shape.expert_layers / 2
    budget = half_budget(model) + (2 << 30)  # for a hundred contexts
    found = {arm: serve(model, arm, budget, half / 2**30, output_len, repeats) for arm in arms.split(",")}
    figures = []
    for arm, values in found.items():
        for metric in ("ttft", "tpot"):
            strategy, tokens = split(arm)
            base = statistics.median(found["static-offload"][metric])
            same = next((other for other in found if split(other) == ("static-offload", tokens)), "static-offload")
            details = {"strategy": strategy, "policy": "lru", "routing": "router", "budget": budget,
                       "output_len": output_len, "requests": REQUESTS, "step_tokens": tokens,
                       "peak_bytes": values["peak"][0],
                       "times_better_than_static": base / statistics.median(values[metric]),
                       "times_better_than_static_with_such_steps":
                           statistics.median(found[same][metric]) / statistics.median(values[metric])}
            figures.append(Figure(f"mean {metric.upper()}, {arm}", "ms", values[metric], base, True, details))
    write("seed-000", figures, output)


if __name__ == "__main__":
    main()
