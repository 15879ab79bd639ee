"""Options of `spill serve` for the number of servers and where they run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from spillover.errors import SpilloverError

MOST = 64
_NAMES = ("replicas", "min_replicas", "max_replicas", "target_backlog_seconds", "scale_down_seconds", "ray",
          "ray_address", "ray_resources", "ray_placement_seconds")


@dataclass(frozen=True)
class FleetOptions:
    """The number of servers, and where they run."""

    replicas: int  # number at the start
    least: int
    most: int
    target_backlog_seconds: float = 2.0
    scale_down_seconds: float = 120.0
    ray: bool = False
    ray_address: str | None = None
    ray_resources: dict[str, float] | None = None  # per replica; None to derive them from the engine's flags
    ray_placement_seconds: float = 60.0

    @property
    def scales(self) -> bool:
        return self.most > self.least


def fleet_options(command: Any) -> Any:
    """Add these options to a command."""
    for option in reversed((
            click.option("--replicas", default=None, type=click.INT, metavar="N",
                         help="Start N servers and route to them; each gets the memory that the flags give, and its "
                              "own GPU if there are several."),
            click.option("--min-replicas", default=None, type=click.INT, metavar="N",
                         help="Minimum number of servers, with --max-replicas.  [default: --replicas, or 1]"),
            click.option("--max-replicas", default=None, type=click.INT, metavar="N",
                         help="Start more servers while requests are predicted to wait, up to N, and stop those that "
                              "are not needed."),
            click.option("--target-backlog-seconds", default=2.0, show_default=True,
                         type=click.FloatRange(min=0, min_open=True),
                         help="Predicted wait of a request above which servers are added."),
            click.option("--scale-down-seconds", default=120.0, show_default=True, type=click.FloatRange(min=0),
                         help="How long one server fewer must be enough before a server is stopped."),
            click.option("--ray", is_flag=True,
                         help="Run the servers on a Ray cluster, each on a machine with the resources it needs; needs "
                              "spillover[ray]."),
            click.option("--ray-address", default=None, metavar="HOST:PORT",
                         help="Ray cluster to join.  [default: RAY_ADDRESS, this machine's, or a new one]"),
            click.option("--ray-resources", default=None, metavar="JSON",
                         help="Resources that each server needs, such as '{\"GPU\": 1, \"CPU\": 8}'.  [default: a CPU, "
                              "and a GPU for each rank]"),
            click.option("--ray-placement-seconds", default=60.0, show_default=True,
                         type=click.FloatRange(min=0, min_open=True),
                         help="How long a server may wait for a machine with these resources free."))):
        command = option(command)
    return command


def pop_fleet_options(options: dict[str, Any]) -> FleetOptions | None:
    """Remove these options from the others and check them; None means one server, in this process."""
    taken = {name: options.pop(name) for name in _NAMES}
    replicas, least, most = (taken[name] for name in ("replicas", "min_replicas", "max_replicas"))
    if replicas is None and least is None and most is None and not taken["ray"]:
        _refuse_given(("target_backlog_seconds", "scale_down_seconds"), "give --max-replicas N too")
        _refuse_given(("ray_address", "ray_resources", "ray_placement_seconds"), "give --ray too")
        return None
    for flag, value in (("--replicas", replicas), ("--min-replicas", least), ("--max-replicas", most)):
        if value is not None and not 1 <= value <= MOST:
            raise SpilloverError(f"{flag} is from 1 to {MOST}; got {value}")
    if least is not None and most is None:
        raise SpilloverError("--min-replicas needs --max-replicas, up to which servers are added")
    if most is None:
        _refuse_given(("target_backlog_seconds", "scale_down_seconds"), "give --max-replicas N too")
    least = least or replicas or 1
    most = most or least
    count = replicas or least
    if not least <= count <= most:
        raise SpilloverError(f"--min-replicas, --replicas and --max-replicas must be in this order; got {least}, "
                             f"{count} and {most}")
    if not taken["ray"]:
        _refuse_given(("ray_address", "ray_resources", "ray_placement_seconds"), "give --ray too")
    return FleetOptions(count, least, most, taken["target_backlog_seconds"], taken["scale_down_seconds"], taken["ray"],
                        taken["ray_address"], _resources(taken["ray_resources"]), taken["ray_placement_seconds"])


def _resources(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    example = "write something like '{\"GPU\": 1, \"CPU\": 8}'"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SpilloverError(f"--ray-resources is not JSON ({error}); {example}") from None
    fits = isinstance(given, dict) and given and all(
        type(amount) in (int, float) and 0 <= amount < float("inf") for amount in given.values())
    if not fits:
        raise SpilloverError(f"--ray-resources has a number for each resource, none below 0; got {text!r}: {example}")
    return {str(name): float(amount) for name, amount in given.items()}


def _refuse_given(names: tuple[str, ...], instead: str) -> None:
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is not click.core.ParameterSource.DEFAULT:
            raise SpilloverError(f"{param.opts[0]} is for several servers: {instead}")
