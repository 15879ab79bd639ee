"""The commands `spill plan` and `spill doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--quantizations", is_flag=True,
              help="Show instead one row per weight format: bytes, whether it fits, what is left for KV, and how fast.")
@click.option("--card", default=None, metavar="NAME",
              help="Predict for this card instead of this machine's: h200, h100, b200, a100, l40s, l4, rtx-4090 or "
                   "rtx-5090, by a table of measured and published rates that is printed with its sources.")
@click.option("--link", default=None, metavar="NAME",
              help="How those cards are connected: nvlink, pcie4 or pcie5. Default: the card's fastest.")
@engine_options()
def plan(config: EngineConfig, as_json: bool, quantizations: bool, card: str | None, link: str | None) -> None:
    """Show the memory plan, and how fast the model could run.

    Splits the budget between weights, KV cache and workspace, or says what would fit. A model larger than the budget is
    placed by --weights: which weights stay on the device, which move, and at what speed. Loads no weights.

    With --tensor-parallel-size N, predicts for N cards that share the model, present or not: memory of each card, step
    times, and the share of all-reduces, compared with one card; for a mixture of experts also with
    --enable-expert-parallel. With --device cpu, plans for ranks on this machine's cores.

    \b
    Examples:
      spill plan --gpu-memory 2GB --max-model-len 4096
      spill plan openai/gpt-oss-120b --gpu-memory 32GB --weights experts
      spill plan Qwen/Qwen3-32B --gpu-memory 24GB --quantizations
      spill plan meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --card h100 --link nvlink
    """
    from rich.console import Console

    if card is not None or link is not None or (config.tensor_parallel_size > 1 and config.device != "cpu"):
        if quantizations:
            raise SpilloverError("--quantizations is for this machine: leave it out, or --tensor-parallel-size, --card "
                                 "and --link")
        from spillover.cli.plan.plan_ranks import run_plan_ranks

        run_plan_ranks(Console(), config, card, link, as_json)
        return
    if quantizations:
        from spillover.cli.plan.plan_quantizations import run_quantizations

        run_quantizations(Console(), config, as_json)
        return
    from spillover.cli.plan.plan import run_plan

    run_plan(Console(), config, as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--disk", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Also measure the disk that this folder is on.")
@click.option("--bits", is_flag=True, help="Check instead that a row has the same bits in every batch: each kernel, at "
                                           "each number of rows. Exits with 1 if one differs.")
def doctor(as_json: bool, disk: Path | None, bits: bool) -> None:
    """Show the hardware of this machine, and how fast it is.

    Devices, memory and its limits, measured memory bandwidth, links and matrix rates, on one screen. With --bits,
    checks that kernels give a request the same bits in every batch (on a GPU those without --fast).

    \b
    Examples:
      spill doctor
      spill doctor --bits
    """
    from rich.console import Console

    from spillover.cli.plan.doctor import run_bits, run_doctor

    if bits:
        run_bits(Console(), as_json)
    else:
        run_doctor(Console(), as_json, disk)
