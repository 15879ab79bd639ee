"""A replica as a Ray actor: Ray chooses its machine, and the router restarts it when it or the machine is lost.

An actor's resources are on one machine, so all ranks of a replica are together. Replicas are spread over machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import spillover
from spillover.cluster.owned.process import START_SECONDS, STOP_SECONDS
from spillover.cluster.owned.ray_actor import ReplicaActor
from spillover.errors import SpilloverError
from spillover.server.replica import ReplicaLaunch, read_news

if TYPE_CHECKING:
    from spillover.server.replica import News

INSTALL = "pip install 'spillover[ray]'"
CONNECT_SECONDS = 5.0  # timeout of connecting to a cluster's address
CALL_SECONDS = 30.0  # timeout of a call to a live actor


@dataclass(frozen=True)
class RayOptions:
    resources: Mapping[str, float]  # resources of each replica
    placement_seconds: float = 60.0  # timeout until a machine has them free


def connect(address: str | None, seconds: float) -> Any:
    """Join a cluster, or start one on this machine, and return the module `ray`. A cluster that is just starting gets
    `seconds` to become ready. Raise SpilloverError if there is none."""
    try:
        import ray
    except ImportError:
        raise SpilloverError(f"--ray needs Ray: {INSTALL}") from None
    deadline = time.monotonic() + seconds
    address = address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").rpartition(":")
    known = bool(colon) and port.isdigit() and "://" not in host
    while True:
        if known:  # check first, as Ray itself would retry for minutes
            _probe(host.strip("[]"), int(port))
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True, include_dashboard=False)
            return ray
        except ConnectionError as error:
            if not known or time.monotonic() >= deadline:
                raise SpilloverError(f"Ray cannot be used: {_first_line(error)}") from None
            time.sleep(1.0)
        except Exception as error:  # Ray raises bare ones too, as when its processes do not start in time
            raise SpilloverError(f"Ray cannot be used: {_first_line(error)}") from None


def _probe(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise SpilloverError(f"no Ray cluster answers at {host}:{port} ({error.strerror or error}); `ray start --head` "
                             "on a machine starts one and prints its address") from None


class RayServer:
    def __init__(self, ray: Any, launch: ReplicaLaunch, options: RayOptions) -> None:
        """Own one server; `ray` is the connected module."""
        self.started = 0.0
        self._ray = ray
        self._launch = launch
        self._options = options
        self._actor: Any = None
        self._placed = False

    async def spawn(self) -> str:
        await self.stop()
        self.started = time.monotonic()
        resources = dict(self._options.resources)
        made = self._ray.remote(ReplicaActor).options(
            num_cpus=resources.pop("CPU", 0.0), num_gpus=resources.pop("GPU", 0.0),
            memory=int(resources.pop("memory", 0)) or None, resources=resources, max_restarts=0, max_concurrency=8,
            scheduling_strategy="SPREAD")
        self._actor = made.remote()
        try:
            async with asyncio.timeout(self._options.placement_seconds):
                address, version = await self._actor.node.remote()
        except TimeoutError:
            await self.stop()
            raise SpilloverError(self._no_place()) from None
        except self._ray.exceptions.RayError as error:
            await self.stop()
            raise SpilloverError(f"Ray could not start its actor: {_first_line(error)}") from None
        self._placed = True
        self.started = time.monotonic()
        if version != spillover.__version__:
            await self.stop()
            raise SpilloverError(f"{address} has version {version} of this package, and the router "
                                 f"{spillover.__version__}; install the same on all machines")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                url: str = await self._actor.spawn.remote(self._launch.line(), address,
                                                          self._ray.util.get_node_ip_address())
        except (TimeoutError, self._ray.exceptions.RayError) as error:
            await self.stop()
            raise SpilloverError(f"{address} could not start a server: {_first_line(error)}") from None
        return url

    async def news(self) -> AsyncIterator[News]:
        while True:
            try:
                async with asyncio.timeout(START_SECONDS):
                    line = await self._actor.line.remote()
            except TimeoutError:
                raise SpilloverError(f"it reported no progress for {START_SECONDS:.0f} s while starting") from None
            except self._ray.exceptions.RayError as error:
                raise SpilloverError(f"its actor was lost: {_first_line(error)}") from None
            if not line:
                return
            yield read_news(line)

    async def ended(self) -> str:
        try:
            return str(await self._actor.ended.remote())
        except self._ray.exceptions.RayError as error:
            return f"its actor was lost: {_first_line(error)}"

    async def stop(self) -> None:
        actor, placed = self._actor, self._placed
        self._actor, self._placed = None, False
        if actor is None:
            return
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
            if placed:
                async with asyncio.timeout(STOP_SECONDS + CALL_SECONDS):
                    await actor.stop.remote()
        self._ray.kill(actor)

    def _no_place(self) -> str:
        asked, free = self._options.resources, self._ray.available_resources()
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in asked.items() if amount)
        left = ", ".join(f"{free.get(name, 0.0):g} {name}" for name, amount in asked.items() if amount)
        return (f"no machine of the Ray cluster had {wanted} free within {self._options.placement_seconds:g} s (free "
                f"in all: {left}); add machines, or ask for less with --ray-resources")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
