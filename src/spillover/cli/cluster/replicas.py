"""`spill serve --replicas N` and `--ray`: servers on this machine or on a Ray cluster, a fixed number or as many as the
load needs, and the router in front of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.cluster.fleet_options import FleetOptions
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from socket import socket

    from spillover.cluster.owned.replicas import OwnedServer
    from spillover.server.settings import ServerSettings

LEAVE_SECONDS = 5.0  # timeout in seconds for the pool of replicas to stop


def check_replicas(config: EngineConfig, count: int, gpus: list[str], disaggregation: str = "never", *,
                   ray: bool = False) -> None:
    """Refuse flags that `count` servers cannot share, before anything is loaded."""
    if config.kv_events_config is not None:
        raise SpilloverError("with --replicas KV events are configured automatically: leave --kv-events-config out")
    if not config.enable_prefix_caching:
        raise SpilloverError("--replicas routes by cached prefixes, so it needs --enable-prefix-caching")
    on_cards = gpus and not ray and config.device != "cpu" and config.load_format != "null"
    if on_cards and count > len(gpus) and config.gpu_memory is None and config.num_gpu_blocks_override is None:
        raise SpilloverError(f"{count} replicas share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: give "
                             "--gpu-memory, the memory of each replica")
    if disaggregation != "never" and count < 2:
        raise SpilloverError(f"--disaggregation {disaggregation} needs --replicas 2 or more: one computes a prompt, "
                             "another decodes its answer")
    if disaggregation != "never" and ray and config.remote is None:
        raise SpilloverError(f"--disaggregation {disaggregation} with --ray needs --remote, a store that all machines "
                             "reach")


@contextlib.contextmanager
def own_pool(config: EngineConfig, disaggregation: str, capacity: int) -> Iterator[EngineConfig]:
    """Run a pool for KV that is computed by other replicas, if no other store is given; yield the replicas' flags,
    which spill blocks as soon as they are computed. The pool stops with this process, as the replicas do."""
    if disaggregation == "never":
        yield config
        return
    if config.host_pool is not None or config.remote is not None:
        yield dataclasses.replace(config, spill="eager")
        return
    from spillover.memory.shared_pool.owner import PoolOwner

    # A socket's path is at most 107 bytes long; only this user may enter the folder.
    with tempfile.TemporaryDirectory(prefix="spillover-", dir="/tmp" if os.path.isdir("/tmp") else None) as folder, \
            PoolOwner(capacity, Path(folder) / "pool" / "sock") as owner:
        serving = threading.Thread(target=owner.run, name="spillover-pool", daemon=True)
        serving.start()
        try:
            yield dataclasses.replace(config, host_pool=str(owner.path), spill="eager")
        finally:
            owner.stop()
            serving.join(LEAVE_SECONDS)


def visible_gpus(environment: Mapping[str, str] = os.environ, folder: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Return the GPUs available to replicas, as named in CUDA_VISIBLE_DEVICES. Imports no torch."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    try:
        return [str(index) for index in range(len(os.listdir(folder)))]
    except OSError:
        return []


def replica_config(config: EngineConfig, place: int, folder: str) -> EngineConfig:
    """Return one replica's flags: events for the router in `folder`, and disk folders of its own."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events-{place}",
              "replay_endpoint": f"ipc://{folder}/replay-{place}"}
    disks = []
    for text in config.disk:
        path, _, size = text.rpartition(":")
        disks.append(f"{Path(path).expanduser() / f'replica-{place}'}:{size}")
    return dataclasses.replace(config, kv_events_config=json.dumps(events), disk=tuple(disks))


def replica_environment(config: EngineConfig, place: int, count: int, gpus: list[str]) -> dict[str, str]:
    """Return a replica's own environment variables: its GPU, or its share of the cores."""
    if gpus and config.device != "cpu" and config.load_format != "null":
        return {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // count))}


def ray_resources(config: EngineConfig, fleet: FleetOptions, cluster: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a replica: the given ones, or one CPU, and one GPU per rank if the cluster has GPUs."""
    if fleet.ray_resources is not None:
        return fleet.ray_resources
    on_cards = config.device == "cuda" or (config.device != "cpu" and cluster.get("GPU", 0) > 0)
    ranks = float(config.tensor_parallel_size)
    return {"CPU": 1.0, "GPU": ranks} if on_cards and config.load_format != "null" else {"CPU": 1.0}


def serve_replicas(config: EngineConfig, settings: ServerSettings, fleet: FleetOptions, routing: dict[str, Any],
                   listening: socket, address: str) -> None:
    """Start the replicas and route to them until Ctrl-C."""
    from rich.console import Console
    from rich.markup import escape

    from spillover.cli.loading import fetch
    from spillover.cli.plan.plan import print_plan
    from spillover.cluster.owned.autoscale import ScaleSettings
    from spillover.cluster.owned.replicas import OwnedReplicas
    from spillover.cluster.serve import serve_router
    from spillover.cluster.settings import RouterSettings
    from spillover.cluster.upstream import Upstream
    from spillover.cluster.watch import WatchSettings
    from spillover.server.telemetry.logs import set_up_logging

    set_up_logging(settings.log_format)
    console = Console()
    key = secrets.token_hex(16)
    shown: dict[int, str] = {}

    def progress(place: int, stage: str, done: int, total: int) -> None:
        if shown.get(place) != stage:
            shown[place] = stage
            click.echo(f"replica-{place}: {stage}", err=True)

    own = dataclasses.replace(settings, api_keys=(*settings.api_keys, key), host="127.0.0.1", port=0,
                              cors_origins=(), ssl_certfile=None, ssl_keyfile=None, log_requests=False,
                              admin_routes=False, admin_keys=(), shutdown_delay_seconds=0.0)
    scale = ScaleSettings(fleet.least, fleet.most, fleet.target_backlog_seconds,
                          fleet.scale_down_seconds) if fleet.scales else None
    made = RouterSettings(
        host=settings.host, port=settings.port, api_keys=settings.api_keys, admin_keys=settings.admin_keys,
        pass_keys=bool(settings.api_keys), max_request_bytes=settings.max_request_bytes,
        max_connections=settings.max_connections, client_timeout=settings.client_timeout,
        cors_origins=settings.cors_origins, allowed_hosts=settings.allowed_hosts,
        ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile, drain_seconds=settings.drain_seconds,
        shutdown_delay_seconds=settings.shutdown_delay_seconds,
        log_requests=settings.log_requests, log_format=settings.log_format, scale=scale,
        watch=WatchSettings(health_seconds=routing.pop("health_seconds")),
        policy=routing.pop("routing_policy"), session_header=routing.pop("session_header").lower(),
        prefill=tuple(f"replica-{place}" for place in range(routing.pop("prefill_replicas"))), **routing)

    def announce() -> None:
        names = escape(", ".join(settings.served_model_names))
        many = f"{fleet.least} to {fleet.most}" if fleet.scales else str(fleet.replicas)
        console.print(f"[bold]{names}[/bold] is served at {address}/v1 by {many} replicas"
                      + (" on Ray" if fleet.ray else ""), highlight=False, soft_wrap=True)
        console.print(f"Replicas: {address}/replicas   Ctrl-C stops.", highlight=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        servers = _on_ray(config, own, fleet, stack) if fleet.ray else _processes(config, own, fleet, stack)
        fetch(config.model)
        replicas = OwnedReplicas(servers, key, count=fleet.replicas, on_plan=lambda plan: print_plan(console, plan),
                                 on_progress=progress)
        serve_router(made, [(f"replica-{place}", Upstream("http://127.0.0.1:1", key)) for place in range(fleet.most)],
                     listening, on_ready=announce, replicas=replicas)


def _processes(config: EngineConfig, own: ServerSettings, fleet: FleetOptions,
               stack: contextlib.ExitStack) -> Sequence[OwnedServer]:
    """Return servers that run as processes of this machine."""
    from spillover.cluster.owned.process import ServerProcess
    from spillover.server.replica import ReplicaLaunch

    # A socket's path is at most 107 bytes long; only this user may enter the folder.
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spillover-",
                                                             dir="/tmp" if os.path.isdir("/tmp") else None))
    gpus = visible_gpus()

    def launch(place: int, listening: int) -> bytes:
        return ReplicaLaunch(replica_config(config, place, folder), own, listening).line()

    return [ServerProcess(functools.partial(launch, place), replica_environment(config, place, fleet.most, gpus))
            for place in range(fleet.most)]


def _on_ray(config: EngineConfig, own: ServerSettings, fleet: FleetOptions,
            stack: contextlib.ExitStack) -> Sequence[OwnedServer]:
    """Join a Ray cluster until `stack` is closed, and return servers that run as its actors."""
    from spillover.cluster.owned.ray_server import RayOptions, RayServer, connect
    from spillover.server.replica import ReplicaLaunch

    ray = connect(fleet.ray_address, fleet.ray_placement_seconds)
    stack.callback(ray.shutdown)
    resources = ray_resources(config, fleet, ray.cluster_resources())
    options = RayOptions(resources, fleet.ray_placement_seconds)
    return [RayServer(ray, ReplicaLaunch(replica_config(config, place, ""), own, -1), options)
            for place in range(fleet.most)]
