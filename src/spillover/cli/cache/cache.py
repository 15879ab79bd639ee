"""`spill cache`: inspects and maintains the KV on a disk tier and in a shared pool."""

from __future__ import annotations

from pathlib import Path

import click

from spillover.cli.cache.cache_pool import ago, kind, pool_socket, prune_pool, show_pool
from spillover.cli.cache.cache_warm import warm
from spillover.errors import SpilloverError
from spillover.units import format_bytes, parse_bytes, parse_seconds

DAMAGED = 1  # exit code of `verify` if it finds damage


@click.group()
def cache() -> None:
    """Inspect, verify and prune the KV of a disk tier or of a shared pool.

    \b
    Examples:
      spill cache ls /nvme/kv
      spill cache ls auto
      spill cache verify /nvme/kv
      spill cache prune /nvme/kv --older-than 7d
      spill cache warm /nvme/kv:200GB --prompts prompts.jsonl
    """


cache.add_command(warm)

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


@cache.command()
@click.argument("path")
@_JSON
def ls(path: str, as_json: bool) -> None:
    """Show the contents of a disk tier or a shared pool: one row per model, type and layout. Reads only; servers may be
    using it. PATH is a folder, or the socket of `spill pool serve`; auto is the pool of --host-pool auto.

    \b
    Examples:
      spill cache ls /nvme/kv
      spill cache ls auto
    """
    if (pool := pool_socket(path)) is not None:
        show_pool(pool, as_json)
        return
    from rich.console import Console
    from rich.table import Table

    from spillover.memory.tiers.inspect import list_caches

    caches = list_caches(_folder(path))
    if as_json:
        Console().print_json(data=[{"identity": found.identity, "description": found.description,
                                    "blocks": found.blocks, "bytes": found.nbytes, "last_use": found.last_use}
                                   for found in caches])
        return
    if not caches:
        click.echo(f"no KV in {_folder(path)}")
        return
    table = Table(caption=f"{sum(found.blocks for found in caches):,} blocks, "
                          f"{format_bytes(sum(found.nbytes for found in caches))} on disk", caption_justify="left")
    table.add_column("identity", no_wrap=True)
    for heading in ("model", "type"):
        table.add_column(heading, overflow="fold")
    for heading in ("block", "blocks", "on disk", "last used"):
        table.add_column(heading, justify="right")
    for found in caches:
        about = found.description
        table.add_row(found.identity[:8], about.get("model", "?"), kind(about), f"{about.get('block_size', '?')} tok",
                      f"{found.blocks:,}", format_bytes(found.nbytes), ago(found.last_use))
    Console().print(table)


@cache.command()
@click.argument("path")
@click.option("--identity", default=None, help="Check only this cache, by its identity in `ls` or a prefix of it.")
@click.option("--kv-store-key-file", default=None, metavar="FILE", help="Key with which the blocks were written.")
@_JSON
def verify(path: str, identity: str | None, kv_store_key_file: str | None, as_json: bool) -> None:
    """Read every block and compare checksums. Exits with 1 and lists each record that does not match its checksum and
    each segment file that cannot be read.

    Reads only; a server may be using the folder, and never loads a damaged block anyway.

    \b
    Example:
      spill cache verify /nvme/kv
    """
    import json

    from spillover.memory.tiers.inspect import verify as check
    from spillover.memory.tiers.seal import read_seal
    from spillover.progress import stages

    bad, checked, nbytes = [], 0, 0
    with stages() as show:
        for progress in check(_folder(path), identity, read_seal(kv_store_key_file)):
            checked, nbytes = progress.checked, progress.nbytes
            if checked:  # an unreadable segment is reported before any record
                show("Verifying", nbytes, nbytes * progress.total // checked)
            if progress.bad is not None:
                bad.append(progress.bad)
    if as_json:
        click.echo(json.dumps({"checked": checked, "bytes": nbytes, "bad": [
            {"file": str(record.file), "offset": record.offset, "reason": record.reason,
             "key": None if record.key is None else record.key.hex()} for record in bad]}))
    else:
        for record in bad:
            key = "" if record.key is None else f", block {record.key.hex()}"
            click.echo(f"{record.file} at byte {record.offset:,}{key}: {record.reason}")
        click.echo(f"{checked:,} records, {format_bytes(nbytes)} read: "
                   + (f"{len(bad):,} damaged" if bad else "all checksums match"))
    if bad:
        click.get_current_context().exit(DAMAGED)


@cache.command()
@click.argument("path")
@click.option("--size", default=None, metavar="SIZE", help="Drop the least recently used blocks down to this total "
                                                           "size.")
@click.option("--older-than", default=None, metavar="TIME", help="Drop blocks not used for this long, e.g. 7d.")
@click.option("--identity", default=None, help="Prune only this cache, by its identity in `ls`; without --size and "
                                               "--older-than, drop all of it.")
@_JSON
def prune(path: str, size: str | None, older_than: str | None, identity: str | None, as_json: bool) -> None:
    """Drop blocks and return their space to the disk. Refused while a server uses the folder. In a shared pool (its
    socket, or auto), which servers may be using, the space is for other blocks.

    \b
    Examples:
      spill cache prune /nvme/kv --size 50GB
      spill cache prune auto --older-than 1h
      spill cache prune /nvme/kv --identity 6001bb16
    """
    import json

    from spillover.memory.tiers.prune import prune as drop

    if size is None and older_than is None and identity is None:
        raise SpilloverError("prune needs to know which blocks to drop; give --size, --older-than or --identity")
    limit = None if size is None else parse_bytes(size)
    age = None if older_than is None else parse_seconds(older_than)
    if (pool := pool_socket(path)) is not None:
        prune_pool(pool, limit, age, identity, as_json)
        return
    pruned = drop(_folder(path), size=limit, older_than=age, identity=identity)
    if as_json:
        click.echo(json.dumps({"blocks": pruned.blocks, "bytes": pruned.nbytes}))
    else:
        click.echo(f"{pruned.blocks:,} blocks dropped, {format_bytes(pruned.nbytes)} freed")


def _folder(text: str) -> Path:
    """Return a folder, given as a path or as PATH:SIZE as for `--disk`."""
    path = Path(text).expanduser()
    if not path.exists() and ":" in text:
        from spillover.memory.budgets import parse_disk

        return parse_disk(text).path
    return path
