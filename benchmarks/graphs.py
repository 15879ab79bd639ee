"""Decode with and without CUDA graphs, at several batch sizes: step time, and what the graphs cost at the start.

    python benchmarks/graphs.py
"""

from __future__ import annotations

import random
import time

import click
from gpu_workload import Figure, opened, options, roofline, run, write

from spillover import LLM
from spillover.plan.roofline import Roofline

SIZES = (1, 4, 16, 64)
INPUT_LEN, OUTPUT_LEN = 256, 64


def step_seconds(llm: LLM, size: int, seed: int) -> float:
    """A decode step of `size` requests."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(INPUT_LEN)] for _ in range(size)]
    outputs = run(llm, prompts, [OUTPUT_LEN] * size, 0.0)
    last = max(output.timings.first_token for output in outputs if output.timings is not None)
    end = max(output.timings.finished for output in outputs if output.timings is not None)
    return (end - last) / (OUTPUT_LEN - 1)


def measure(model: str, roof: Roofline, eager: bool, repeats: int) -> list[Figure]:
    figures = []
    name = "eager" if eager else "graphs"
    start = time.perf_counter()
    with opened(model, max_num_seqs=SIZES[-1], max_model_len=1024, enable_prefix_caching=False,
                enforce_eager=eager) as llm:
        loaded = time.perf_counter() - start
        for size in SIZES:
            step_seconds(llm, size, 0)
            times = [step_seconds(llm, size, seed) for seed in range(1, repeats + 1)]
            stats = getattr(llm.engine.runner, "graph_stats", None)
            details = {"batch": size, "mode": name, "load_seconds": loaded, "graphs": stats.graphs if stats else 0,
                       "graph_seconds": stats.seconds if stats else 0.0, "graph_bytes": stats.nbytes if stats else 0}
            limit = roof.decode(size, INPUT_LEN + OUTPUT_LEN // 2)
            figures.append(Figure(f"decode step, batch {size}, {name}", "ms", [each * 1e3 for each in times],
                                  limit.seconds * 1e3, True, details))
    return figures


@click.command()
@click.option("--model", default="qwen3-0.6b", show_default=True)
@options()
def main(model: str, repeats: int, output: str | None) -> None:
    roof = roofline(model)
    figures = [figure for eager in (True, False) for figure in measure(model, roof, eager, repeats)]
    table = {(figure.details["batch"], figure.details["mode"]): figure.value for figure in figures}
    for size in SIZES:
        print(f"batch {size:3d}: eager {table[size, 'eager']:6.2f} ms, graphs {table[size, 'graphs']:6.2f} ms, "
              f"{table[size, 'eager'] / table[size, 'graphs']:.2f}x", flush=True)
    write(f"graphs-{model}", figures, output)


if __name__ == "__main__":
    main()
