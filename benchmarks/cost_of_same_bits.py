"""What one order of sums costs: each workload by default and with --fast, in turns; random weights of the true shapes.

    python benchmarks/cost_of_same_bits.py --output results
    python benchmarks/cost_of_same_bits.py --only w1-0.6b --only w3 --repeats 1

W1, W2, W3 and prefill are those of w1_qwen3.py, w3_decode.py and prefill.py. A turn loads the model anew and warms up,
so that neither way has the card for itself while it is cold.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from gpu_workload import RESULTS, opened, origin
from prefill import LENGTHS, prefill_seconds
from w1_qwen3 import REQUESTS, seconds, workload
from w3_decode import decode_rate

from spillover import LLM


@dataclass(frozen=True)
class Load:
    model: str
    flags: dict[str, Any]
    measure: Callable[[LLM], dict[str, float]]  # seconds, by what took them


def many(size: str, llm: LLM) -> dict[str, float]:
    prompts, lengths = workload(size)
    seconds(llm, prompts, [2] * len(prompts))
    return {"whole": seconds(llm, prompts, lengths)}


def single(llm: LLM) -> dict[str, float]:
    decode_rate(llm, 512, 128, seed=0)
    return {"token": statistics.median(1 / decode_rate(llm, 512, 128, seed) for seed in range(1, 6))}


def prompts(llm: LLM) -> dict[str, float]:
    found = {}
    for length in LENGTHS:
        for seed in (0, 1):
            prefill_seconds(llm, length, seed)
        found[f"{length} tokens"] = statistics.median(prefill_seconds(llm, length, seed) for seed in range(2, 9))
    return found


BATCH = {"max_num_seqs": REQUESTS, "max_model_len": 4096, "block_size": 64, "graph_capture": "start"}
LOADS = {
    "w1-0.6b": Load("qwen3-0.6b", BATCH, partial(many, "0.6b")),
    "w1-14b": Load("qwen3-14b", BATCH, partial(many, "14b")),
    "w2-8b": Load("qwen3-8b", {**BATCH, "enable_prefix_caching": False}, partial(many, "8b")),
    "w3": Load("llama-3.1-8b", {"max_num_seqs": 8, "max_model_len": 640, "enable_prefix_caching": False}, single),
    "0.6b, one request": Load("qwen3-0.6b", {"max_num_seqs": 8, "max_model_len": 640, "enable_prefix_caching": False},
                              single),
    "prefill": Load("llama-3.1-8b", {"max_num_seqs": 4, "max_model_len": LENGTHS[-1] + 8,
                                     "max_num_batched_tokens": LENGTHS[-1], "enable_prefix_caching": False}, prompts),
}


def turn(load: Load, fast: bool) -> dict[str, float]:
    with opened(load.model, fast=fast, **load.flags) as llm:
        found = load.measure(llm)
    gc.collect()
    return found


@click.command()
@click.option("--only", type=click.Choice(list(LOADS)), multiple=True, help="Some of the workloads.  [default: all]")
@click.option("--repeats", default=3, show_default=True)
@click.option("--output", default=None, metavar="FILE", help="Write the times; 'results' is benchmarks/results/.")
def main(only: tuple[str, ...], repeats: int, output: str | None) -> None:
    rows: list[dict[str, Any]] = []
    for name in only or LOADS:
        start, turns = time.perf_counter(), []
        for index in range(repeats):
            pair = {fast: turn(LOADS[name], fast) for fast in ((False, True) if index % 2 == 0 else (True, False))}
            turns.append(pair)
        for part in turns[0][False]:
            default, fast = ([pair[which][part] for pair in turns] for which in (False, True))
            ratio = statistics.median(default) / statistics.median(fast)
            rows.append({"workload": name, "part": part, "default_seconds": default, "fast_seconds": fast,
                         "ratio": ratio})
            print(f"{name}, {part}: default {statistics.median(default):.6g} s, --fast "
                  f"{statistics.median(fast):.6g} s, ratio {ratio:.3f} ({time.perf_counter() - start:.0f} s for it)",
                  flush=True)
        if output is not None:  # after every workload: a run that is cut short leaves what it has
            path = RESULTS / "cost-of-same-bits.json" if output == "results" else Path(output)
            path.write_text(json.dumps({**origin(), "block_size": 64, "workloads": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
