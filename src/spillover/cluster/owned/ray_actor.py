"""The part of a replica on the machine that Ray chose for it: an actor that owns the server's process there.

The process is the same that `spill serve --replicas` starts. Requests and tokens go to it over HTTP, not through Ray;
the actor holds its standard input, so that it ends when the actor does, however that ends. Imports no Ray.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import socket
from typing import NamedTuple

import msgspec

import spillover
from spillover.cluster.owned.process import HOST, ServerProcess
from spillover.server.replica import ReplicaLaunch


class Node(NamedTuple):
    """The machine of an actor."""

    address: str  # address of the machine as other machines know it
    version: str  # version of the package there


class ReplicaActor:
    """One replica. Methods run in the actor's event loop, several at once."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    async def node(self) -> Node:
        import ray

        return Node(ray.util.get_node_ip_address(), spillover.__version__)

    async def spawn(self, line: bytes, address: str, router: str) -> str:
        """Start the server that `line` describes on this machine, whose address is `address`, and return its URL. If
        the router has the same address, the server listens on the loopback interface only."""
        launch = msgspec.msgpack.decode(base64.b64decode(line), type=ReplicaLaunch)
        alone = address == router
        events = "127.0.0.1" if alone else "*"
        launch.config = dataclasses.replace(launch.config, kv_events_config=json.dumps(
            {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://{events}:{_free_port()}",
             "replay_endpoint": f"tcp://{events}:{_free_port()}"}))

        def described(listening: int) -> bytes:
            return msgspec.structs.replace(launch, listening=listening).line()

        self._server = ServerProcess(described, _environment(launch), host=HOST if alone else "0.0.0.0",
                                     address=HOST if alone else address)
        return await self._server.spawn()

    async def line(self) -> bytes:
        """Return the next line that the server prints; empty once it has exited."""
        assert self._server is not None
        return await self._server.line()

    async def ended(self) -> str:
        assert self._server is not None
        return await self._server.ended()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


def _environment(launch: ReplicaLaunch) -> dict[str, str]:
    """Return variables to add to the actor's environment. Ray limits an actor's threads to its number of cores, which
    would be one for a replica on a GPU."""
    on_device = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and launch.config.device != "cpu"
    return {"OMP_NUM_THREADS": str(os.cpu_count() or 1)} if on_device else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
