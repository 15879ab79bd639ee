"""W1 and W2: 256 requests sent at once.

    python benchmarks/w1_qwen3.py --model 0.6b      # W1: prompts and outputs of 100 to 1024 tokens
    python benchmarks/w1_qwen3.py --model 8b        # W2: 1024 in, 1024 out, no prefix cache

W1 is the benchmark of nano-vllm and mini-sglang: seed 0, prompt ids below 10,000, temperature 0.6, no end of sequence.
"""

from __future__ import annotations

import random
import time

import click
from gpu_workload import Figure, opened, options, roofline, run, write

from spillover import LLM
from spillover.bench.bounds import workload_bound
from spillover.bench.target import BenchRequest
from spillover.cli.bench.targets import RooflineLimits

REQUESTS = 256


def workload(model: str, requests: int = REQUESTS) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(0)
    if model == "8b":
        return [[rng.randint(0, 10000) for _ in range(1024)] for _ in range(requests)], [1024] * requests
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(requests)]
    return prompts, [rng.randint(100, 1024) for _ in range(requests)]


def seconds(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = run(llm, prompts, lengths, 0.6)
    elapsed = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return elapsed


@click.command()
@click.option("--model", type=click.Choice(["0.6b", "8b", "14b"]), default="0.6b", show_default=True)
@click.option("--max-num-batched-tokens", type=int, default=None)
@click.option("--block-size", type=int, default=16, show_default=True)
@click.option("--enforce-eager", is_flag=True)
@click.option("--fast", is_flag=True)
@click.option("--warmup", type=click.Choice(["full", "short"]), default="full", show_default=True,
              help="Before: the whole workload once, or a few tokens of each request.")
@options()
def main(model: str, max_num_batched_tokens: int | None, block_size: int, enforce_eager: bool, fast: bool,
         warmup: str, repeats: int, output: str | None) -> None:
    prompts, lengths = workload(model)
    name, second = f"qwen3-{model}", model == "8b"
    limits = RooflineLimits(roofline(name))  # before the model takes the memory
    with opened(name, max_num_seqs=REQUESTS, max_model_len=4096, block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=not second,
                enforce_eager=enforce_eager, fast=fast) as llm:
        if warmup == "full":
            print(f"warm-up: {seconds(llm, prompts, lengths):.2f} s", flush=True)
        else:
            seconds(llm, prompts[:8], [2] * 8)
            seconds(llm, [prompt[:32] for prompt in prompts], [4] * len(prompts))
        times = [seconds(llm, prompts, lengths) for _ in range(repeats)]
        requests = [BenchRequest(tuple(p), n) for p, n in zip(prompts, lengths, strict=True)]
        bound = workload_bound(limits, requests, [0] * len(requests), REQUESTS)
        rates = {"memory_gb_per_second": limits.memory_rate / 1e9, "matrix_tflop_per_second": limits.matrix_rate / 1e12,
                 "seconds": times, "preemptions": llm.stats().preemptions, "block_size": block_size}
    if second:
        write("w2-qwen3-8b", [Figure("time", "s", times, bound.seconds, True, rates)], output)
    else:
        total = sum(lengths)
        write(f"w1-qwen3-{model}", [Figure("output throughput", "tok/s", [total / each for each in times],
                                           total / bound.seconds, details=rates)], output)


if __name__ == "__main__":
    main()
