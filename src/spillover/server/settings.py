"""What the HTTP front is told at its start; parsed once, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spillover.server.engine.heartbeat import HangLimits
from spillover.server.telemetry.logs import LogFormat

MetricsPrefix = Literal["spillover", "vllm"]
DEFAULT_ALIAS = "default"  # always answers, whatever the model is called


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()  # the first is the one that answers carry
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty, and no file: no key is asked for
    api_key_file: str | None = None  # keys with names
    metrics_prefix: MetricsPrefix = "spillover"  # "vllm": also vLLM's metrics under its own names
    otlp_traces_endpoint: str | None = None  # URL that spans are sent to; None: no traces
    max_queue: int = 1024  # sequences waiting and running together
    max_request_bytes: int = 4 * 1024 * 1024
    cors_origins: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    shutdown_delay_seconds: float = 0.0  # requests are still taken for this long after a signal; not ready meanwhile
    log_requests: bool = True
    log_prompts: bool = False
    log_format: LogFormat = "text"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    special_tokens_in_user_text: bool = True  # False: what messages hold is text, whatever it looks like
    limits: HangLimits = field(default_factory=HangLimits)  # after which the engine is taken for hung
    profiler_dir: str | None = None  # for the traces of /start_profile; None: the route is off
    max_json_values: int = 262_144  # in one body
    max_messages: int = 2048  # in one conversation
    response_store_bytes: int = 64 * 1024 * 1024  # memory for responses of /v1/responses; 0 keeps none
    max_connections: int = 4096
    client_timeout: float = 30.0  # seconds for a request to arrive whole, beside what its body's size takes
    allowed_hosts: tuple[str, ...] = ()  # Host headers taken besides addresses and this machine's own names
    admin_routes: bool = False  # /sleep, /wake_up and /reset_prefix_cache
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # for these routes; empty: as for the others

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return every name a request may use."""
        return tuple(dict.fromkeys((*self.served_model_names, DEFAULT_ALIAS)))
