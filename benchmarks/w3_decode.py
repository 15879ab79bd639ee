"""W3: Llama-3.1-8B in bfloat16, one request of 512 tokens in and 128 out: how fast tokens follow each other.

    python benchmarks/w3_decode.py
"""

from __future__ import annotations

import random

import click
from gpu_workload import Figure, opened, options, roofline, run, write

from spillover import LLM


def decode_rate(llm: LLM, prompt_len: int, output_len: int, seed: int) -> float:
    """Tokens a second after the first one."""
    rng = random.Random(seed)
    output = run(llm, [[rng.randint(0, 10000) for _ in range(prompt_len)]], [output_len], 0.0)[0]
    assert output.timings is not None
    return (output_len - 1) / output.timings.decode


@click.command()
@click.option("--input-len", default=512, show_default=True)
@click.option("--output-len", default=128, show_default=True)
@click.option("--enforce-eager", is_flag=True)
@click.option("--fast", is_flag=True)
@options(repeats=5)
def main(input_len: int, output_len: int, enforce_eager: bool, fast: bool, repeats: int,
         output: str | None) -> None:
    limit = roofline("llama-3.1-8b").decode(1, input_len + output_len // 2)
    with opened("llama-3.1-8b", max_num_seqs=8, max_model_len=input_len + output_len, enable_prefix_caching=False,
                enforce_eager=enforce_eager, fast=fast) as llm:
        decode_rate(llm, input_len, output_len, seed=0)
        rates = [decode_rate(llm, input_len, output_len, seed) for seed in range(1, repeats + 1)]
    write("w3-llama-3.1-8b", [Figure("decode rate", "tok/s", rates, limit.tokens_per_second)], output)


if __name__ == "__main__":
    main()
