"""The part of `spill cache` for a shared pool, which queries the pool's owner."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import TypeVar

import click

from spillover.errors import SpilloverError
from spillover.units import format_bytes

T = TypeVar("T")


def pool_socket(text: str) -> Path | None:
    """Return the socket of a pool's owner; None if the text names a folder."""
    from spillover.memory.shared_pool.wire import socket_path

    path = Path(text).expanduser()
    if text == "auto" and not path.exists():
        return socket_path("auto")
    return path if path.exists() and stat.S_ISSOCK(path.stat().st_mode) else None


def show_pool(path: Path, as_json: bool) -> None:
    """Print the contents of a pool."""
    from rich.console import Console
    from rich.table import Table

    from spillover.memory.shared_pool.wire import Ask, Report

    report = _request(path, Ask(), Report)
    if as_json:
        Console().print_json(data={
            "socket": str(path), "pid": report.pid, "capacity": report.capacity, "used": report.used,
            "resident": report.prepared, "engines": report.engines, "uptime": report.uptime,
            "weights": report.weights, "weights_used": report.weights_used,
            "models": [{name: getattr(model, name) for name in model.__struct_fields__} for model in report.models]})
        return
    weights = f", and {format_bytes(report.weights)} of weights" if report.weights else ""
    table = Table(caption=f"{format_bytes(report.used)} of {format_bytes(report.capacity)} in use{weights} at {path} "
                          f"(process {report.pid}), {report.engines} engines connected", caption_justify="left")
    table.add_column("identity", no_wrap=True)
    for heading in ("model", "type"):
        table.add_column(heading, overflow="fold")
    for heading in ("blocks", "bytes", "engines", "hits", "last used"):
        table.add_column(heading, justify="right")
    for model in report.models:
        about = model.description
        table.add_row(model.identity[:8], about.get("model", "?"), kind(about), f"{model.blocks:,}",
                      format_bytes(model.bytes), f"{model.engines}", f"{model.hits:,}", ago(model.last_use))
    Console().print(table)


def prune_pool(path: Path, size: int | None, older_than: float | None, identity: str | None, as_json: bool) -> None:
    """Drop blocks of a pool and print how many."""
    import json

    from spillover.memory.shared_pool.wire import Ask, Count, Evict, Report

    before = _request(path, Ask(), Report)
    chosen = [model for model in before.models if identity is None or model.identity.startswith(identity)]
    dropped = 0
    if identity is not None and len(chosen) != 1:
        raise SpilloverError(f"{len(chosen) or 'no'} models in the pool have an identity that begins with {identity}; "
                             f"`spill cache ls {path}` lists the models in it")
    if older_than is not None or size is None:
        dropped += _request(path, Evict(sum(model.blocks for model in chosen), identity, older_than), Count).count
    while size is not None:
        left = [model for model in _request(path, Ask(), Report).models
                if identity is None or model.identity.startswith(identity)]
        over, largest = sum(model.bytes for model in left) - size, max((m.payload_bytes for m in left), default=1)
        if over <= 0 or not (gone := _request(path, Evict(-(-over // largest), identity), Count).count):
            break
        dropped += gone
    after = _request(path, Ask(), Report)
    nbytes = sum(model.bytes for model in before.models) - sum(model.bytes for model in after.models)
    if as_json:
        click.echo(json.dumps({"blocks": dropped, "bytes": max(0, nbytes)}))
    else:
        click.echo(f"{dropped:,} blocks dropped, {format_bytes(max(0, nbytes))} free for others")


def kind(about: dict[str, str]) -> str:
    """Return the data types of a cache according to its description."""
    stored = next((about[name] for name in ("spill_dtype", "kv_cache_dtype") if about.get(name, "auto") != "auto"), "")
    return f"{about.get('dtype', '?')}{', ' + stored if stored else ''}"


def ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _request(path: Path, request: object, answer: type[T]) -> T:
    from spillover.memory.shared_pool.client import PoolUnavailableError, ask_owner

    try:
        return ask_owner(path, request, answer)  # type: ignore[arg-type]
    except PoolUnavailableError as error:
        raise SpilloverError(f"the pool at {path} does not answer: {error}; `spill pool serve` starts one") from None
