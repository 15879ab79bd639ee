"""Speed of the default mode (batch-invariant: the same bits in every batch) on one GPU, compared with --fast.

    python benchmarks/default_speed.py --output results
    python benchmarks/default_speed.py --only qwen3-0.6b --only llama-3.1-8b --mode default

Random weights of the true shapes. W1: 256 requests of 100 to 1,024 tokens in and out, all at once; W2: 256 of 1,024 in
and 1,024 out; one request: 512 tokens in, 128 out, timed after the first token. Each mode has its own engine, one after
the other; everything is run as a warm-up before it is measured.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
from gpu_workload import MODELS, RESULTS, decode_rate, opened, origin, prefill_seconds, run
from mixture_workload import decode_rate as mixture_decode_rate
from mixture_workload import prefill_rate

from spillover import LLM

REQUESTS = 256
MODELS["qwen3-30b-a3b-fp8"] = MODELS["qwen3-30b-a3b"] | {
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}


def one_request(llm: LLM, seed: int) -> float:
    return decode_rate(llm, 512, 128, seed)


def whole(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the output tokens per second of all requests together."""
    start = time.perf_counter()
    outputs = run(llm, prompts, lengths, 0.6)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return sum(lengths) / (time.perf_counter() - start)


def w1(llm: LLM, _seed: int) -> float:
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(REQUESTS)]
    return whole(llm, prompts, [rng.randint(100, 1024) for _ in range(REQUESTS)])


def w2(llm: LLM, _seed: int) -> float:
    rng = random.Random(0)
    return whole(llm, [[rng.randint(0, 10000) for _ in range(1024)] for _ in range(REQUESTS)], [1024] * REQUESTS)


class Measured(NamedTuple):
    flags: dict[str, Any]
    what: dict[str, Callable[[LLM, int], float]]  # functions that return tokens per second


MANY = {"max_num_seqs": REQUESTS, "max_model_len": 4096, "block_size": 64, "graph_capture": "start"}
FEW = {"max_num_seqs": 4, "max_model_len": 1024}
LOADS = {
    "qwen3-0.6b": Measured(MANY, {"one request": one_request, "W1": w1}),
    "llama-3.1-8b": Measured({"max_num_seqs": 8, "max_model_len": 8200, "max_num_batched_tokens": 8192}, {
        "W3, one request": one_request, "prefill of 512": lambda llm, seed: 512 / prefill_seconds(llm, 512, seed),
        "prefill of 8,192": lambda llm, seed: 8192 / prefill_seconds(llm, 8192, seed)}),
    "gpt-oss-120b": Measured(FEW, {
        "one request": lambda llm, seed: mixture_decode_rate(llm, random.Random(seed), 128),
        "prefill of 512": lambda llm, seed: prefill_rate(llm, random.Random(seed))}),
    "qwen3-30b-a3b-fp8": Measured(FEW, {
        "one request": lambda llm, seed: mixture_decode_rate(llm, random.Random(seed), 128),
        "prefill of 512": lambda llm, seed: prefill_rate(llm, random.Random(seed))}),
    "qwen3-14b": Measured(MANY, {"W1": w1}),
    "qwen3-8b": Measured(MANY, {"W2": w2}),
}


@click.command()
@click.option("--only", type=click.Choice(list(LOADS)), multiple=True, help="Models to run.  [default: all]")
@click.option("--mode", "modes", type=click.Choice(["default", "fast"]), multiple=True, default=["default", "fast"],
              show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--output", default=None, metavar="FILE", help="Write the rates; 'results' is benchmarks/results/.")
def main(only: tuple[str, ...], modes: tuple[str, ...], repeats: int, output: str | None) -> None:
    rows: list[dict[str, Any]] = []
    for model in only or LOADS:
        for mode in modes:
            load = LOADS[model]
            with opened(model, enable_prefix_caching=False, fast=mode == "fast", **load.flags) as llm:
                started = time.perf_counter()
                for what, measure in load.what.items():
                    for warm_up in range(2 if "prefill" in what else 1):
                        measure(llm, warm_up)
                    rates = [measure(llm, 10 + seed) for seed in range(repeats)]
                    row = next((row for row in rows if (row["model"], row["what"]) == (model, what)), None)
                    if row is None:
                        rows.append(row := {"model": model, "what": what, "unit": "tok/s"})
                    row[mode] = rates
                    print(f"{model}, {what}, {mode}: {', '.join(f'{rate:,.1f}' for rate in rates)} tok/s", flush=True)
                print(f"{model}, {mode}: {time.perf_counter() - started:.0f} s", flush=True)
            if output is not None:  # after every model, so that an interrupted run leaves its results
                path = RESULTS / "default-speed.json" if output == "results" else Path(output)
                path.write_text(json.dumps({**origin(), "weights": "random", "rates": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
