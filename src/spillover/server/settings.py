"""The settings of the HTTP front; parsed once at the start, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spillover.server.engine.heartbeat import HangLimits
from spillover.server.telemetry.logs import LogFormat

MetricsPrefix = Literal["spillover", "vllm"]
DEFAULT_ALIAS = "default"  # name under which the model can always be requested


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()  # names of the model; answers carry the first
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty, and no file: no key is required
    api_key_file: str | None = None  # file of named keys
    metrics_prefix: MetricsPrefix = "spillover"  # "vllm": also export vLLM's metrics under vLLM's names
    otlp_traces_endpoint: str | None = None  # URL that spans are sent to; None for no traces
    max_queue: int = 1024  # maximum number of sequences that wait beyond those that can run
    max_request_bytes: int = 4 * 1024 * 1024
    cors_origins: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    shutdown_delay_seconds: float = 0.0  # seconds after a signal of still accepting requests, though not ready
    log_requests: bool = True
    log_prompts: bool = False
    log_format: LogFormat = "text"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    special_tokens_in_user_text: bool = True  # False: special tokens in messages are read as plain text
    limits: HangLimits = field(default_factory=HangLimits)  # limits after which the engine is considered hung
    profiler_dir: str | None = None  # folder for the traces of /start_profile; None turns the route off
    max_json_values: int = 262_144  # maximum number of JSON values in one body
    max_messages: int = 2048  # maximum number of messages in one conversation
    response_store_bytes: int = 64 * 1024 * 1024  # memory for responses of /v1/responses; 0 keeps none
    max_connections: int = 4096
    client_timeout: float = 30.0  # seconds for a request to arrive, in addition to the time that its body's size takes
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted besides addresses and this machine's names
    admin_routes: bool = False  # whether /sleep, /wake_up and /reset_prefix_cache are enabled
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # keys for these routes; empty: those of other routes

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return every model name that a request may use."""
        return tuple(dict.fromkeys((*self.served_model_names, DEFAULT_ALIAS)))
