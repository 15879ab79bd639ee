"""Llama-3.1-8B in each weight format: one request, 64 requests, prefill; and two larger models in 24 GB.

    python benchmarks/quantized_models.py --output results
    python benchmarks/quantized_models.py --only int4 --only fp8 --repeats 1
    python benchmarks/quantized_models.py --only qwen3-32b-int4 --only llama-3.1-70b-int4   # in 24 GB

Weights are random, of the true shapes. One request: 512 tokens in, 128 out, tokens per second after the first. 64
requests: 1,024 in, 128 out, tokens per second after the last prompt has been computed. Prefill: 8,192 tokens to the
first token. Every model is measured in a separate process with a deadline.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from gpu_workload import RESULTS, decode_rate, opened, origin, prefill_seconds, run

from spillover import LLM

MANY, LONG = 64, 8192
DEADLINE = 150  # seconds that one model may take
WHOLE = {"bf16": "llama-3.1-8b", "fp8": "llama-3.1-8b-fp8", "fp8-blocks": "llama-3.1-8b-fp8-blocks",
         "int8": "llama-3.1-8b-int8", "int4": "llama-3.1-8b-int4"}  # name in results -> shape
IN_24GB = ("qwen3-32b-int4", "llama-3.1-70b-int4")


def many_rate(llm: LLM, output_len: int, seed: int) -> float:
    """Return the tokens per second of MANY requests, by the one whose prompt is last: it decodes with all others."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(1024)] for _ in range(MANY)]
    outputs = run(llm, prompts, [output_len] * MANY, 0.0)
    last = max((output.timings for output in outputs if output.timings is not None), key=lambda t: t.first_token)
    return MANY * (output_len - 1) / last.decode


def whole(name: str, repeats: int) -> dict[str, Any]:
    """Measure a model that fits into device memory: one request, MANY requests, and prefill."""
    with opened(WHOLE[name], max_num_seqs=MANY, max_model_len=LONG + 8, max_num_batched_tokens=LONG,
                enable_prefix_caching=False, graph_capture="start") as llm:
        decode_rate(llm, 512, 128, 0)
        many_rate(llm, 16, 0)
        for seed in (0, 1):
            prefill_seconds(llm, LONG, seed)
        return {"weight_bytes": llm.plan.weight_bytes,
                "one_request": [decode_rate(llm, 512, 128, seed) for seed in range(1, repeats + 1)],
                "many_requests": [many_rate(llm, 128, seed) for seed in range(1, repeats + 1)],
                "prefill": [LONG / prefill_seconds(llm, LONG, seed) for seed in range(2, repeats + 2)]}


def tight(name: str, repeats: int) -> dict[str, Any]:
    """Measure one request with a model in 24 GB of device memory."""
    with opened(name, gpu_memory="24GB", max_num_seqs=4, max_model_len=2048, max_num_batched_tokens=1024,
                enable_prefix_caching=False) as llm:
        print(llm.plan, flush=True)
        traffic = llm.engine.runner.weight_traffic
        decode_rate(llm, 128, 4, 0)
        before, start, rates = traffic().bytes_moved, time.perf_counter(), []
        for seed in range(1, repeats + 1):
            rates.append(decode_rate(llm, 128, 16, seed))
        moved = (traffic().bytes_moved - before) / (time.perf_counter() - start)
        return {"weight_bytes": llm.plan.weight_bytes, "one_request": rates, "bytes_moved_per_second": moved}


@click.command()
@click.option("--only", type=click.Choice([*WHOLE, *IN_24GB]), multiple=True, help="Models to run. [default: all]")
@click.option("--repeats", default=3, show_default=True)
@click.option("--output", default=None, metavar="FILE", help="Write the rates; 'results' is benchmarks/results/.")
@click.option("--one", is_flag=True, hidden=True)
def main(only: tuple[str, ...], repeats: int, output: str | None, one: bool) -> None:
    if one:
        (name,) = only
        print("FOUND " + json.dumps(whole(name, repeats) if name in WHOLE else tight(name, repeats)), flush=True)
        return
    found: dict[str, Any] = {}
    for name in only or (*WHOLE, *IN_24GB):
        command = [sys.executable, __file__, "--one", "--only", name, "--repeats", str(repeats)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
            report = next((line for line in ran.stdout.splitlines() if line.startswith("FOUND ")), None)
            failed = {"error": (ran.stdout + ran.stderr)[-2000:]}
            found[name] = json.loads(report.removeprefix("FOUND ")) if report else failed
            if name in IN_24GB:
                print(ran.stdout, flush=True)
        except subprocess.TimeoutExpired as late:
            found[name] = {"error": f"not within {DEADLINE} s: {late.stdout!r}"}
        medians = {key: round(statistics.median(value), 1) for key, value in found[name].items()
                   if isinstance(value, list)}
        print(name, medians or found[name], flush=True)
        if output is not None:
            path = RESULTS / "quantized-models.json" if output == "results" else Path(output)
            path.write_text(json.dumps({**origin(), "weights": "random", "models": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
