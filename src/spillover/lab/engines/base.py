"""The interface of all engine adapters: start, read, reset, stop.

An engine is a server that speaks the OpenAI API. It is described by an `EngineSpec` (from a YAML file or a preset),
runs as a process group that the lab owns, and is stopped when its `with` block exits. A failed start, a crash or
running out of memory is a result (`EngineFailed`); an engine that is not installed is `Missing`, and the arm is
skipped.
"""

from __future__ import annotations

import json
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Self

from spillover.bench.serving.server_facts import exchange
from spillover.errors import SpilloverError
from spillover.lab.engines.metrics_text import bare, counters_from, label_of, parse_metrics

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine. `args` are its own flags without dashes; see `flags.py` for their notation."""

    kind: str  # spillover, in-process, vllm, sglang, llamacpp or url
    model: str | None = None  # None for spillover's default model, or whatever a url serves
    args: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    env: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    preset: str | None = None
    python: str | None = None  # interpreter of the engine's environment; None for the current one
    url: str | None = None  # address of a server that is already running (kind url)
    ready_seconds: float = 600.0

    def to_json(self) -> dict[str, Any]:
        """Return the arm's entry in a result; equal specs give equal text."""
        return {"kind": self.kind, "model": self.model, "args": dict(self.args), "env": dict(self.env),
                "preset": self.preset, "python": self.python, "url": self.url, "ready_seconds": self.ready_seconds}


@dataclass(frozen=True)
class Running:
    """A server that answered its health check."""

    url: str  # http://host:port, without /v1
    model_name: str  # model name for requests
    pid: int | None  # None if the lab did not start it (kind url)
    log_path: Path | None
    version: str
    command: tuple[str, ...] = ()  # command line that started it; empty if the lab did not
    start_seconds: float = 0.0  # seconds from the start of the process to its first healthy answer
    batches: bool = False  # whether it accepts all requests of a run at once instead of serving them


@dataclass(frozen=True)
class Missing:
    """A missing engine or requirement, and how to install it."""

    reason: str
    install: str

    def __str__(self) -> str:
        return f"skipped: {self.reason}; needed: {self.install}"


@dataclass(frozen=True)
class CacheReset:
    """The outcome of a reset; `done` False: the prefix cache stays, so runs need prompts that it has not seen."""

    done: bool
    how: str


class EngineFailed(SpilloverError):  # noqa: N818 - a result, which experiments keep
    """The engine did not start, crashed or ran out of memory: a result of its arm."""

    def __init__(self, cause: str, reason: str, log_tail: str = "") -> None:
        super().__init__(reason)
        self.cause = cause  # "out of memory", "crash" (after being healthy) or "no start"
        self.reason = reason
        self.log_tail = log_tail

    def to_json(self) -> dict[str, str]:
        return {"cause": self.cause, "reason": self.reason, "log_tail": self.log_tail}


class Engine(ABC):
    """A context manager: the server runs inside the block.

    `metrics()` returns all metrics of the server, by sample name with labels. `counters()` returns those that engines
    share, under common names: prompt_tokens, generation_tokens, prefix_queries, prefix_hits (tokens), preemptions. A
    counter that an engine does not have is left out, never 0.
    """

    kind: ClassVar[str]
    COUNTERS: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # our name -> the engine's counters that add up to it
    GAUGES: ClassVar[Mapping[str, str]] = {}  # our name -> the engine's gauge

    def __init__(self, spec: EngineSpec, log_folder: Path | None = None) -> None:
        self.spec = spec
        self.log_folder = log_folder  # None for a temporary file, removed after a clean stop
        self._running: Running | None = None

    @classmethod
    @abstractmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        """Return why the engine is not installed, None if it is; see also `engines.missing`."""

    @abstractmethod
    def start(self) -> Running: ...

    @abstractmethod
    def stop(self) -> None:
        """Stop the server and everything it started; may be called twice."""

    @abstractmethod
    def check(self) -> None:
        """Raise `EngineFailed` if the server has died since it started."""

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def reset_cache(self) -> CacheReset: ...

    def command(self, port: int) -> list[str]:
        """Return the command that starts it, for reports and dry runs; empty if nothing is started."""
        return []

    def pids(self) -> tuple[int, ...]:
        """Return all live processes of the engine."""
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Return the server's metrics; empty if it has no Prometheus page."""
        try:
            return parse_metrics(self.get("/metrics"))
        except (OSError, ValueError):
            return {}

    def counters(self) -> Mapping[str, float]:
        return counters_from(self.metrics(), self.COUNTERS)

    def gauges(self) -> Mapping[str, float]:
        """Return current values, averaged over labels; zeros and gauges that the engine lacks are left out."""
        samples = self.metrics() if self.GAUGES else {}
        found = {ours: [value for key, value in samples.items() if bare(key) == theirs]
                 for ours, theirs in self.GAUGES.items()}
        return {name: sum(values) / len(values) for name, values in found.items() if any(values)}

    def device_pool_tokens(self) -> int | None:
        """Return the capacity of the device's KV pool in tokens; None if the engine does not report it."""
        samples = self.metrics()
        for name in ("vllm:cache_config_info", "spillover:cache_config_info"):
            blocks, size = (label_of(samples, name, label) for label in ("num_gpu_blocks", "block_size"))
            if blocks is not None and size is not None and blocks.isdigit() and size.isdigit():
                return int(blocks) * int(size)
        return None

    @property
    def running(self) -> Running:
        if self._running is None:
            raise SpilloverError(f"the {self.kind} engine is not running; use it as `with engine:`")
        return self._running

    def get(self, path: str, timeout: float = 10.0) -> str:
        """Return the body of a 200 answer; raise OSError otherwise."""
        with urllib.request.urlopen(self.running.url + path, timeout=timeout) as answer:
            text: str = answer.read().decode(errors="replace")
            return text

    def get_json(self, path: str) -> Any:
        """Return the page's JSON; None if there is no such page."""
        try:
            return json.loads(self.get(path))
        except (OSError, ValueError):
            return None

    def post(self, path: str, timeout: float = 60.0) -> int:
        """Return the status of an empty POST; 0 if no server answers."""
        return exchange(self.running.url + path, data=b"", seconds=timeout)[0]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
