"""The settings of the router; parsed once at the start, never changed."""

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
    disaggregation: Mode = "never"  # whether prompts are computed at another replica than the one that decodes
    prefill: tuple[str, ...] = ()  # names of replicas for prompts
    scale: ScaleSettings | None = None  # autoscaling of the number of replicas; None keeps the number started
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is required
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # keys for draining; empty: those of other routes
    pass_keys: bool = True  # forward the client's Authorization; False: the replicas' own key replaces it
    session_header: str = "x-session-id"
    retries: int = 3  # number of times that a request is sent to another replica before its first token
    max_in_flight: int = 4096  # maximum number of requests in flight; further ones get 429
    wait_seconds: float = 5.0  # time that a request waits for a usable replica before it gets 503
    answer_seconds: float = 600.0  # time without a byte from the replica after which a request is aborted
    max_request_bytes: int = 4 * 1024 * 1024
    max_connections: int = 4096
    client_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    drain_seconds: float = 30.0
    shutdown_delay_seconds: float = 0.0  # seconds after a signal of still accepting requests, though not ready
    log_requests: bool = True
    log_format: LogFormat = "text"
    watch: WatchSettings = field(default_factory=WatchSettings)
