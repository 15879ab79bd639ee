"""What the router is told at its start; parsed once, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from spillover.cluster.disaggregate import Mode
from spillover.cluster.owned.autoscale import ScaleSettings
from spillover.cluster.watch import WatchSettings
from spillover.server.telemetry.logs import LogFormat


@dataclass(frozen=True)
class RouterSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "predicted"
    disaggregation: Mode = "never"  # prompts computed at another replica than the one that decodes
    prefill: tuple[str, ...] = ()  # names of replicas that are there for prompts
    scale: ScaleSettings | None = None  # as many replicas as the load needs; None: as many as were started
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is asked for
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # for draining; empty: as for the others
    pass_keys: bool = True  # send the client's Authorization on; False: the replicas' own key takes its place
    session_header: str = "x-session-id"
    retries: int = 3  # times that a request is sent elsewhere before its first token
    max_in_flight: int = 4096  # requests under way; further ones get 429
    wait_seconds: float = 5.0  # that a request waits for a replica that can take it, then 503
    answer_seconds: float = 600.0  # without a byte from the replica, after which it is given up
    max_request_bytes: int = 4 * 1024 * 1024
    max_connections: int = 4096
    client_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    drain_seconds: float = 30.0
    shutdown_delay_seconds: float = 0.0  # requests are still taken for this long after a signal; not ready meanwhile
    log_requests: bool = True
    log_format: LogFormat = "text"
    watch: WatchSettings = field(default_factory=WatchSettings)
