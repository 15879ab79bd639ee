"""`spill quantize`: a model in fewer bits, as a folder that this engine, vLLM and transformers read."""

from __future__ import annotations

from pathlib import Path

import click

from spillover.cli.options import NearestChoice
from spillover.units import format_bytes, parse_budget, parse_bytes


@click.command()
@click.argument("model")
@click.option("--to", "kind", type=NearestChoice(("int4", "int8", "fp8")), required=True, metavar="[int4|int8|fp8]",
              help="Format of the weights: int4 and int8 in groups with a scale each, fp8 (e4m3) with a scale per row.")
@click.option("--out", "folder", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Folder to write.")
@click.option("--group-size", type=int, metavar="N",
              help="Columns that share a scale in int4 and int8; the default is the largest of 128, 64 and 32 that "
                   "divides every row.")
@click.option("--calibrate", "calibration", type=click.Path(path_type=Path), metavar="FILE",
              help="Text that int4 and int8 are calibrated on, which lowers their error: plain text, or .json and "
                   ".jsonl with texts or conversations.")
@click.option("--calibration-tokens", type=click.IntRange(128), default=32_768, show_default=True, metavar="N",
              help="Tokens of the file that are used.")
@click.option("--ignore", "ignored", multiple=True, metavar="NAME",
              help="Module to leave unquantised, such as model.layers.0.mlp.down_proj, or a pattern after re:; may be "
                   "given more than once. lm_head and routers always are.")
@click.option("--dtype", type=NearestChoice(("auto", "bfloat16", "float16", "float32")), default="auto",
              show_default=True,
              help="Type of scales and of tensors that are not quantised; auto is the model's own if that has 16 bits, "
                   "else bfloat16.")
@click.option("--device", type=NearestChoice(("auto", "cpu", "cuda")), default="auto", show_default=True,
              help="Device to quantise on, and to run the calibration on.")
@click.option("--host-memory", metavar="SIZE",
              help="Maximum memory for quantising, e.g. 16GB or 50%; all free memory by default.")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE",
              help="Maximum size of one safetensors file (GB: 1000 MB, GiB or G: 1024 MiB).")
@click.option("--force", is_flag=True, help="Replace the model in a folder that is not empty.")
def quantize(model: str, kind: str, folder: Path, group_size: int | None, calibration: Path | None,
             calibration_tokens: int, ignored: tuple[str, ...], dtype: str, device: str, host_memory: str | None,
             max_shard_size: str, force: bool) -> None:
    """Write a model in fewer bits, as a compressed-tensors folder.

    This engine, vLLM and transformers read it. MODEL is a name, a folder or a GGUF file; the linear layers are
    quantised, one matrix at a time. A GGUF file in codes is dequantised first, other quantised models are refused.

    \b
    Examples:
      spill quantize default --to int4 --out ./SmolLM2-int4 --calibrate chats.jsonl
      spill quantize ./Llama-3.1-8B --to fp8 --out ./Llama-3.1-8B-fp8
    """
    from spillover.progress import IMPORTING, stages

    with stages() as show:
        from spillover.models.hub.store import resolve

        source = resolve(model, show)
        show(IMPORTING, 0, 0)
        import torch

        from spillover.models.quantize.quantize import QuantizeOptions
        from spillover.models.quantize.quantize import quantize as write
        from spillover.plan.hardware import probe

        machine = probe()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        budget = (machine.memory_available if host_memory is None
                  else parse_budget(host_memory, "--host-memory", machine.memory))
        options = QuantizeOptions(kind, group_size, ignored, dtype, calibration, calibration_tokens, device)
        written = write(source, folder, options, parse_bytes(max_shard_size), force, budget, show)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    groups = f" in groups of {written.scheme.group}" if written.scheme.group else " with a scale per row"
    tokens = f", calibrated on {written.tokens:,} tokens" if written.tokens else ""
    if written.dequantized:
        click.echo(f"{source.name} was already quantised: its weights were dequantised first, and both errors add up",
                   err=True)
    click.echo(f"{kind}{groups}{tokens}: {format_bytes(size)}", err=True)
    click.echo(str(written.folder))
