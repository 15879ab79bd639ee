"""Qwen3-30B-A3B with experts in FP8 and in bfloat16, all of it on one GPU: decode at batch 1, prefill of 512 tokens.

    python benchmarks/qwen3_30b_resident.py

Random weights route almost uniformly, which real ones do not; at batch 1 a resident step reads the same bytes anyway.
"""

from __future__ import annotations

import click
from gpu_workload import MODELS, options, write
from mixture_workload import figures

MODELS["qwen3-30b-a3b-fp8"] = MODELS["qwen3-30b-a3b"] | {
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}


@click.command()
@click.option("--output-len", default=128, show_default=True)
@click.option("--enforce-eager", is_flag=True)
@options(repeats=5)
def main(output_len: int, enforce_eager: bool, repeats: int, output: str | None) -> None:
    found = [*figures("qwen3-30b-a3b-fp8", "fp8 experts", output_len, repeats, enforce_eager),
             *figures("qwen3-30b-a3b", "bfloat16", output_len, repeats, enforce_eager)]
    write("qwen3-30b-a3b-resident", found, output)


if __name__ == "__main__":
    main()
