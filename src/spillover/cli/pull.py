"""`spill pull`: downloads models and manages those kept on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spillover.errors import SpilloverError
from spillover.units import format_bytes

if TYPE_CHECKING:
    from spillover.models.hub.store import StoredModel


@click.command()
@click.argument("source", metavar="[NAME|DIR|FILE]", required=False)
@click.option("--name", default=None, help="Keep it under this name instead of its own.")
@click.option("--list", "listing", is_flag=True, help="Show the models that are kept.")
@click.option("--verify", is_flag=True, help="Check the files of a kept model against their hashes.")
@click.option("--remove", is_flag=True, help="Delete a kept model from the cache.")
def pull(source: str | None, name: str | None, listing: bool, verify: bool, remove: bool) -> None:
    """Download a model and keep it.

    Without a name, this is the default model. A model is a name, a Hugging Face hub id, a folder with safetensors or a
    GGUF file.

    \b
    Examples:
      spill pull
      spill pull Qwen/Qwen3-0.6B
      spill pull ./model.gguf
      spill pull --list
    """
    if listing + verify + remove > 1:
        raise SpilloverError("--list, --verify and --remove contradict each other: give one of them")
    if name is not None and (listing or verify or remove):
        raise SpilloverError("--name belongs to a pull; leave it out with --list, --verify and --remove")
    if listing and source is not None:
        raise SpilloverError("--list shows every model; leave out the name")
    if (verify or remove) and source is None:
        raise SpilloverError(f"--{'verify' if verify else 'remove'} needs the name of a model; see spill pull --list")
    from spillover.models.hub import store
    from spillover.progress import stages

    if listing:
        _print_list(store.list_models(), str(store.models_folder()))
    elif remove:
        model = store.remove(str(source))
        click.echo(f"removed {model.name}, {format_bytes(model.nbytes)}")
    elif verify:
        with stages() as show:
            model = store.verify(str(source), show)
        click.echo(f"{model.name} is whole: every file has its hash")
    else:
        with stages() as show:
            model = store.pull(source or store.DEFAULT_MODEL, name, show)
        click.echo(f"{model.name}, {format_bytes(model.nbytes)}, {model.format}, in {model.path}")


def _print_list(models: list[StoredModel], folder: str) -> None:
    if not models:
        click.echo(f"no models in {folder}; spill pull fetches the default one")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("name", "size", "format", "path"):
        table.add_column(heading, overflow="fold")
    for model in models:
        table.add_row(model.name, format_bytes(model.nbytes), model.format, str(model.path))
    Console().print(table)
