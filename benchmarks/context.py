"""Qwen3-8B, one request: how fast tokens follow each other as the context grows.

    python benchmarks/context.py
"""

from __future__ import annotations

import click
from gpu_workload import Figure, opened, options, roofline, write
from w3_decode import decode_rate

CONTEXTS = (1024, 8192, 32768)
OUTPUT_LEN = 64


@click.command()
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@options()
def main(kv_cache_dtype: str, repeats: int, output: str | None) -> None:
    roof = roofline("qwen3-8b")
    figures = []
    with opened("qwen3-8b", max_num_seqs=4, max_model_len=CONTEXTS[-1] + OUTPUT_LEN, enable_prefix_caching=False,
                kv_cache_dtype=kv_cache_dtype) as llm:
        for context in CONTEXTS:
            decode_rate(llm, context, OUTPUT_LEN, seed=0)
            rates = [decode_rate(llm, context, OUTPUT_LEN, seed) for seed in range(1, repeats + 1)]
            limit = roof.decode(1, context + OUTPUT_LEN // 2)
            figures.append(Figure(f"decode rate at {context} tokens", "tok/s", rates, limit.tokens_per_second))
    write("context-qwen3-8b", figures, output, kv_cache_dtype=kv_cache_dtype)


if __name__ == "__main__":
    main()
