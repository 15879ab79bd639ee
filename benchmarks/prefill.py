"""Llama-3.1-8B: how fast a prompt is taken in, 512 tokens and 8192, to the first token.

    python benchmarks/prefill.py
"""

from __future__ import annotations

import random

import click
from gpu_workload import Figure, opened, options, roofline, run, write

from spillover import LLM

LENGTHS = (512, 8192)


def prefill_seconds(llm: LLM, length: int, seed: int) -> float:
    rng = random.Random(seed)
    output = run(llm, [[rng.randint(0, 10000) for _ in range(length)]], [1], 0.0)[0]
    assert output.timings is not None
    return output.timings.first_token - output.timings.scheduled


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--fast", is_flag=True)
@options(repeats=5)
def main(model: str, fast: bool, repeats: int, output: str | None) -> None:
    roof = roofline(model)
    matrix = roof.rates.flops("bfloat16")
    figures = []
    with opened(model, max_num_seqs=4, max_model_len=LENGTHS[-1] + 8, max_num_batched_tokens=LENGTHS[-1],
                enable_prefix_caching=False, fast=fast) as llm:
        for length in LENGTHS:
            prefill_seconds(llm, length, seed=0)
            times = [prefill_seconds(llm, length, seed) for seed in range(1, repeats + 1)]
            limit = roof.prefill(length)
            details = {"percent_of_matrix_rate": 100 * limit.limit.flops / (sorted(times)[len(times) // 2] * matrix)}
            figures.append(Figure(f"prefill of {length} tokens", "tok/s", [length / each for each in times],
                                  limit.tokens_per_second, details=details))
            print(f"{length} tokens: {details['percent_of_matrix_rate']:.0f}% of the measured matrix rate", flush=True)
    write(f"prefill-{model}", figures, output)


if __name__ == "__main__":
    main()
