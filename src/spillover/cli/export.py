"""`spill export`: a model as a Hugging Face folder, for other engines."""

from __future__ import annotations

from pathlib import Path

import click

from spillover.units import parse_bytes


@click.command()
@click.argument("model")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
              show_default=True,
              help="Type of the weights; auto keeps the file's, and makes float32 of quantised ones.")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE",
              help="Maximum size of one safetensors file (GB: 1000 MB, GiB or G: 1024 MiB).")
@click.option("--force", is_flag=True, help="Replace the model in a folder that is not empty.")
def export(model: str, folder: Path | None, dtype: str, max_shard_size: str, force: bool) -> None:
    """Write a model as a Hugging Face folder.

    It has safetensors, config, generation config, tokenizer and chat template, for transformers, vLLM and SGLang. MODEL
    is a name, a folder or a GGUF file. Without DIR the export is made once and kept in the cache; its path is printed.

    \b
    Examples:
      spill export default ./SmolLM2
      spill export ./model.gguf ./model-bf16 --dtype bfloat16
    """
    from spillover.progress import IMPORTING, stages

    with stages() as show:
        from spillover.models.hub.store import resolve

        source = resolve(model, show)
        show(IMPORTING, 0, 0)
        from spillover.models.export import cached_export
        from spillover.models.export import export as write

        if folder is None:
            written = cached_export(source, dtype, show)
        else:
            written = write(source, folder, dtype, parse_bytes(max_shard_size), force, show)
    click.echo(str(written))
