"""`spill serve --replicas N`: N servers of one machine, and the router before them on the asked address."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from socket import socket

    from spillover.server.settings import ServerSettings

MOST = 64
LEAVE_SECONDS = 5.0  # for the pool of replicas to end


def check_replicas(config: EngineConfig, count: int, gpus: list[str], disaggregation: str = "never") -> None:
    """Refuse what several servers cannot share, before anything is loaded."""
    if not 1 <= count <= MOST:
        raise SpilloverError(f"--replicas is from 1 to {MOST}; got {count}")
    if config.kv_events_config is not None:
        raise SpilloverError("with --replicas the servers tell the router what they hold: leave --kv-events-config out")
    if not config.enable_prefix_caching:
        raise SpilloverError("--replicas routes by cached prefixes, so it needs --enable-prefix-caching")
    on_cards = gpus and config.device != "cpu" and config.load_format != "null"
    if on_cards and count > len(gpus) and config.gpu_memory is None and config.num_gpu_blocks_override is None:
        raise SpilloverError(f"{count} replicas share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: say with "
                             "--gpu-memory how much each may take")
    if disaggregation != "never" and count < 2:
        raise SpilloverError(f"--disaggregation {disaggregation} needs --replicas 2 or more: one computes a prompt, "
                             "another decodes its answer")


@contextlib.contextmanager
def own_pool(config: EngineConfig, disaggregation: str, capacity: int) -> Iterator[EngineConfig]:
    """Keep a pool for prompts that are computed apart, where no other store is named; yields the replicas' flags, with
    which blocks leave as soon as they are computed. It ends with this process, as they do."""
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
    """Return the GPUs that replicas may be given, by the names that CUDA_VISIBLE_DEVICES takes. Imports no torch."""
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
    """Return what a replica's environment has of its own: its GPU, or its share of the cores."""
    if gpus and config.device != "cpu" and config.load_format != "null":
        return {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // count))}


def serve_replicas(config: EngineConfig, settings: ServerSettings, count: int, routing: dict[str, Any],
                   listening: socket, address: str) -> None:
    """Start the replicas and route to them until Ctrl-C."""
    from rich.console import Console
    from rich.markup import escape

    from spillover.cli.loading import fetch
    from spillover.cli.plan.plan import print_plan
    from spillover.cluster.processes import ReplicaProcesses
    from spillover.cluster.serve import serve_router
    from spillover.cluster.settings import RouterSettings
    from spillover.cluster.upstream import Upstream
    from spillover.cluster.watch import WatchSettings
    from spillover.server.replica import ReplicaLaunch
    from spillover.server.telemetry.logs import set_up_logging

    set_up_logging(settings.log_format)
    console, gpus = Console(), visible_gpus()
    fetch(config.model)
    key = secrets.token_hex(16)
    shown: dict[int, str] = {}

    def progress(place: int, stage: str, done: int, total: int) -> None:
        if shown.get(place) != stage:
            shown[place] = stage
            click.echo(f"replica-{place}: {stage}", err=True)

    # A socket's path is at most 107 bytes long; only this user may enter the folder.
    with tempfile.TemporaryDirectory(prefix="spillover-", dir="/tmp" if os.path.isdir("/tmp") else None) as folder:
        own = dataclasses.replace(settings, api_keys=(*settings.api_keys, key), host="127.0.0.1", port=0,
                                  cors_origins=(), ssl_certfile=None, ssl_keyfile=None, log_requests=False,
                                  admin_routes=False, admin_keys=(), shutdown_delay_seconds=0.0)
        processes = ReplicaProcesses(
            count, key, lambda place, fd: ReplicaLaunch(replica_config(config, place, folder), own, fd).line(),
            [replica_environment(config, place, count, gpus) for place in range(count)],
            on_plan=lambda plan: print_plan(console, plan), on_progress=progress)
        watch = WatchSettings(health_seconds=routing.pop("health_seconds"))
        names = [f"replica-{place}" for place in range(count)]
        made = RouterSettings(
            host=settings.host, port=settings.port, api_keys=settings.api_keys, admin_keys=settings.admin_keys,
            pass_keys=bool(settings.api_keys), max_request_bytes=settings.max_request_bytes,
            max_connections=settings.max_connections, client_timeout=settings.client_timeout,
            cors_origins=settings.cors_origins, allowed_hosts=settings.allowed_hosts,
            ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile, drain_seconds=settings.drain_seconds,
            shutdown_delay_seconds=settings.shutdown_delay_seconds,
            log_requests=settings.log_requests, log_format=settings.log_format, watch=watch,
            policy=routing.pop("routing_policy"), session_header=routing.pop("session_header").lower(),
            prefill=tuple(names[:routing.pop("prefill_replicas")]), **routing)

        def announce() -> None:
            served = escape(", ".join(settings.served_model_names))
            console.print(f"[bold]{served}[/bold] is served at {address}/v1 by {count} replicas", highlight=False,
                          soft_wrap=True)
            console.print(f"Replicas: {address}/replicas   Ctrl-C stops.", highlight=False, soft_wrap=True)

        serve_router(made, [(name, Upstream("http://127.0.0.1:1", key)) for name in names],
                     listening, on_ready=announce, processes=processes)
