"""gpt-oss-120b in MXFP4, all of it on one GPU: decode at batch 1, and prefill of 512 tokens.

    python benchmarks/gpt_oss_resident.py

Random weights route almost uniformly, which real ones do not; at batch 1 a resident step reads the same bytes anyway.
"""

from __future__ import annotations

import click
from gpu_workload import options, write
from mixture_workload import figures


@click.command()
@click.option("--output-len", default=128, show_default=True)
@click.option("--enforce-eager", is_flag=True)
@options(repeats=5)
def main(output_len: int, enforce_eager: bool, repeats: int, output: str | None) -> None:
    write("gpt-oss-120b-resident", figures("gpt-oss-120b", "mxfp4", output_len, repeats, enforce_eager), output)


if __name__ == "__main__":
    main()
