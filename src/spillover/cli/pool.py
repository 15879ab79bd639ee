"""`spill pool`: the process that owns one host memory for the KV and weights of all engines of a machine."""

from __future__ import annotations

import click

from spillover.errors import SpilloverError
from spillover.units import UNITS_HELP, format_bytes, parse_budget


@click.group()
def pool() -> None:
    """Keep the KV of all engines of this machine, and weights that are not on a device, in one host memory.

    \b
    Examples:
      spill pool serve --memory 64GB
      spill serve MODEL --host-pool auto
      spill cache ls auto
    """


@pool.command()
@click.option("--memory", required=True, metavar="SIZE", help="Budget for KV and weights of all models together: a "
              f"size such as 64GB ({UNITS_HELP}), or a share of the machine's memory such as 50%. It is allocated on "
              "demand and kept.")
@click.option("--socket", default="auto", metavar="PATH", help="Socket for engines, in a folder that only you can "
              "access; auto is one path per user, which --host-pool auto uses too.")
def serve(memory: str, socket: str) -> None:
    """Own the memory until SIGTERM or Ctrl-C. It outlives engines: a restarted one finds its KV and its off-device
    weights here, and engines of the same model share both. If it ends, engines continue and recompute its KV.

    \b
    Examples:
      spill pool serve --memory 64GB
      spill pool serve --memory 50% --socket ~/pools/first.sock
    """
    import logging
    import signal

    from spillover.memory.shared_pool.owner import PoolOwner
    from spillover.memory.shared_pool.wire import socket_path
    from spillover.plan.hardware import probe_memory

    path, (whole, available) = socket_path(socket), probe_memory()
    capacity = parse_budget(memory, "--memory", whole)
    if capacity > available:
        raise SpilloverError(f"--memory is {format_bytes(capacity)} but {format_bytes(available)} of the "
                             f"{format_bytes(whole)} of RAM are available; lower it")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    with PoolOwner(capacity, path) as owner:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: owner.stop())
        click.echo(f"shared pool of {format_bytes(owner.index.capacity)} at {path}; engines use it with --host-pool "
                   f"{'auto' if socket == 'auto' else path}")
        owner.run()
