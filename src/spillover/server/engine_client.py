"""The engine as the front sees it: starts it, hands it requests, streams their answers, starts it again when it dies.

Everything here runs on one event loop. The engine's messages are taken in as they come and kept as state, not in
queues: a reader that is slow finds the newest state when it looks again, and holds up nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from spillover.engine.config import EngineConfig
from spillover.engine.output_processor import Answer
from spillover.engine.request import Request
from spillover.engine.request_factory import RequestFactory
from spillover.errors import SpilloverError
from spillover.models.config import ModelConfig
from spillover.models.tokenizer import Tokenizer
from spillover.plan.planner import Plan
from spillover.server.protocol import LiveStats, Method

EngineState = Literal["starting", "ready", "sleeping", "dead"]


class EngineDead(SpilloverError):  # noqa: N818
    """There is no engine to serve this now (HTTP 503); `retry_after` seconds is when to try again."""

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(SpilloverError):  # noqa: N818
    """Too many requests wait already (HTTP 429)."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineInfo:
    """The engine that serves, or served last."""

    pid: int
    model: str  # as it was asked for
    model_path: str
    model_config: ModelConfig
    plan: Plan
    config: EngineConfig  # as planned: nothing left to choose
    max_model_len: int
    load_seconds: float
    started: float  # monotonic seconds, when it became ready
    restarts: int  # engines that died before this one
    null_model: bool  # --load-format null: no model behind it


class EngineClient:
    info: EngineInfo  # from start() on
    factory: RequestFactory  # from start() on; its make() checks and names requests, and takes long for long texts
    tokenizer: Tokenizer | None  # None with --skip-tokenizer-init

    def __init__(self, config: EngineConfig, *, max_queue: int, restart: bool = True,
                 on_plan: Callable[[Plan], None] | None = None,
                 on_progress: Callable[[str, int, int], None] | None = None) -> None:
        """`max_queue` sequences may wait beyond those that run; `on_plan` sees the plan before anything is loaded,
        `on_progress` (stage, bytes done, bytes in all) follows the loading. `restart`: start again an engine that died.
        """

    async def start(self) -> None:
        """Spawn the engine and wait until it is ready; SpilloverError with its own sentence if it cannot start."""

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, give those that run `drain_seconds` to end, then stop. Nothing is left behind."""

    @property
    def ready(self) -> bool:
        """Requests are taken; also while the engine sleeps, though they wait then."""
        raise NotImplementedError

    @property
    def engine_state(self) -> EngineState:
        raise NotImplementedError

    @property
    def is_sleeping(self) -> bool:
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        """Sequences that have been handed to the engine and have not ended."""
        raise NotImplementedError

    async def generate(self, requests: list[Request], prompt: str | None = None, *,
                       stream: bool = True) -> AsyncIterator[Answer]:
        """The same Answer each time it has grown, the last time with `finished`; without `stream` only that last time.

        `requests` are the n sequences that `factory.make` made of one request. Leaving the iterator early (break
        inside `contextlib.aclosing`, cancellation, aclose) ends the requests at once. The first step of the iteration
        raises QueueFull, EngineDead, or RequestError for a request that the engine refuses (a grammar that does not
        compile); a later one raises EngineDead if the engine dies.
        """
        raise NotImplementedError
        yield

    def latest(self) -> LiveStats:
        """The engine's state as it last told; never older than 0.25 s while it works."""
        raise NotImplementedError

    async def call(self, method: Method, timeout: float = 120.0) -> Any:
        """stats (fresh LiveStats), reset_prefix_cache, sleep, wake_up. EngineDead or SpilloverError if it fails."""
        raise NotImplementedError
