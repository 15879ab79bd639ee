"""Keeps an engine process running: starts it, monitors its heartbeat, replaces it when it dies or hangs, stops it.

It has no knowledge of requests: the engine's messages about them, and the loss of an engine, are passed to callbacks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from spillover.engine.config import EngineConfig
from spillover.errors import EngineDead, SpilloverError
from spillover.models.config import ModelConfig
from spillover.plan.planner import Plan
from spillover.server.engine.heartbeat import HangLimits
from spillover.server.engine.protocol import Failed, FromEngine, Planned, Progress, Ready, Reply, Step
from spillover.server.engine.supervisor import EngineProcess, exit_description

log = logging.getLogger("spillover.server")

KeeperState = Literal["starting", "ready", "hung", "dead"]

START_SECONDS = 900.0  # seconds that a starting engine may be silent: a large model on a slow disk
LOOK_SECONDS = 0.25  # seconds between two checks of the heartbeat
QUICK_DEATH_SECONDS = 60.0  # an engine that lived shorter than this many seconds counts against MAX_QUICK_DEATHS
MAX_QUICK_DEATHS = 5  # quick deaths in a row after which the engine is not restarted
FIRST_BACKOFF_SECONDS = 0.5  # wait before the second restart in a row; doubled for each further one, up to ...
LONGEST_BACKOFF_SECONDS = 30.0
MAX_RETRY_AFTER = 60  # seconds


@dataclass(frozen=True)
class EngineInfo:
    """The engine that is serving, or that served last."""

    pid: int
    model: str  # name or path as the user gave it
    model_path: str
    model_config: ModelConfig
    plan: Plan
    config: EngineConfig  # the configuration as planned, with all choices made
    max_model_len: int
    load_seconds: float
    started: float  # monotonic time in seconds when it became ready
    restarts: int  # number of engines that died before this one
    null_model: bool  # True with --load-format null: there is no model
    identity: bytes  # the root of block digests: what KV depends on besides tokens


class EngineKeeper:
    """A supervisor that keeps an engine running, on the event loop that starts it."""

    info: EngineInfo  # set by start()

    def __init__(self, config: EngineConfig, *, limits: HangLimits, restart: bool,
                 on_message: Callable[[Step | Reply], None], on_lost: Callable[[str], None],
                 on_plan: Callable[[Plan], None] | None, on_progress: Callable[[str, int, int], None] | None) -> None:
        """Keep an engine running. `on_lost` is called with the reason whenever an engine has died with its requests."""
        self.limits = limits
        self.gave_up = False  # True if the engine is dead and will not be restarted
        self.restarts = 0
        self.hangs = 0  # number of engines that were killed because they hung
        self._config = config
        self._restart = restart
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_plan = on_plan
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._state: Literal["starting", "ready", "dead"] = "starting"
        self._why = "the engine is starting"
        self._hang_reason: str | None = None  # why the keeper killed the running process for a hang
        self._last_message = time.monotonic()  # time of the engine's last message
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Spawn the engine and wait until it is ready; raise SpilloverError with the reason if it cannot start."""
        self._tasks.append(asyncio.create_task(self._watch()))
        try:
            await self._launch()
        except BaseException:
            await self.stop("the engine could not be started")
            raise
        self._tasks.append(asyncio.create_task(self._keep_running()))

    async def stop(self, why: str) -> None:
        """Stop the engine; afterwards no part of it remains."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
        self._state, self._why = "dead", why

    @property
    def state(self) -> KeeperState:
        if self._state == "ready" and self.heartbeat_age > self.limits.degraded_seconds:
            return "hung"
        return self._state

    @property
    def heartbeat_age(self) -> float:
        """Return the seconds since the engine last gave a sign of life; 0 if no engine should be running."""
        alive = self._process is not None and self._state != "dead"
        return self._process.heartbeat.silence if alive and self._process is not None else 0.0

    @property
    def trouble(self) -> str | None:
        """Return why requests cannot be served now; None if they can."""
        if self.state == "ready":
            return None
        if self.state == "hung" and self._process is not None:
            age = self.heartbeat_age
            since = datetime.now(UTC) - timedelta(seconds=age)
            return (f"the engine has sent no heartbeat for {age:.1f} s (since {since:%Y-%m-%dT%H:%M:%SZ}); in its last "
                    f"one it was {self._process.heartbeat.described}; after {self.limits.hang_seconds:g} s it is "
                    "restarted")
        return f"{self._why}, and is not restarted" if self.gave_up else f"{self._why}; try again soon"

    def serving(self) -> EngineProcess:
        """Return the process to send requests to; raise EngineDead if there is none that can serve them."""
        if self.trouble is not None or self._process is None:
            raise EngineDead(self.trouble or self._why, MAX_RETRY_AFTER if self.gave_up else 2)
        return self._process

    def send(self, message: bytes) -> None:
        """Send an encoded message, which is lost if there is no engine."""
        if self._process is not None:
            self._process.send(message)

    # One engine process

    async def _launch(self) -> None:
        """Start an engine process and wait until it is ready. Raise SpilloverError if it cannot start."""
        self._state, self._why, self._hang_reason = "starting", "the engine is starting", None
        self._last_message = time.monotonic()
        self._ready = asyncio.get_running_loop().create_future()
        process = self._process = EngineProcess(self._config, self._handle)
        try:
            while True:
                awaited: list[asyncio.Future[Any]] = [self._ready, process.exited]
                await asyncio.wait(awaited, timeout=START_SECONDS / 10, return_when=asyncio.FIRST_COMPLETED)
                if self._ready.done():
                    break
                if process.exited.done():
                    raise SpilloverError(self._start_failure(process.exited.result(), await process.failure()))
                if time.monotonic() - self._last_message > START_SECONDS:
                    raise SpilloverError(f"the engine process reported no progress for {START_SECONDS:.0f} s while "
                                         "starting, and was killed; its log above shows how far it came")
        except BaseException:
            self._state = "dead"
            process.close()
            raise
        ready = self._ready.result()
        self.info = EngineInfo(
            pid=ready.pid,
            model=ready.plan.model,
            model_path=ready.model_path,
            model_config=ready.model_config,
            plan=ready.plan,
            config=ready.config,
            max_model_len=ready.plan.max_model_len,
            load_seconds=ready.load_seconds,
            started=time.monotonic(),
            restarts=self.restarts,
            null_model=ready.config.load_format == "null",
            identity=ready.identity,
        )
        self._state = "ready"

    def _start_failure(self, code: int, failed: Failed | None) -> str:
        if self._hang_reason is not None:
            return f"the engine {self._hang_reason}, while starting"
        if failed is None:
            return f"the engine {exit_description(code)} while starting"
        if failed.expected:
            return failed.message
        log.error("The engine failed while starting:\n%s", failed.message.rstrip())
        return f"the engine failed while starting: {failed.message.strip().splitlines()[-1]}"

    def _handle(self, message: FromEngine) -> None:
        self._last_message = time.monotonic()
        match message:
            case Step() | Reply():
                self._on_message(message)
            case Progress():
                if self._on_progress is not None and self.restarts == 0:
                    self._on_progress(message.stage, message.done, message.total)
            case Planned():
                if self._on_plan is not None and self.restarts == 0:
                    self._on_plan(message.plan)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)

    # Restarts

    async def _keep_running(self) -> None:
        quick_deaths = 0
        while True:
            assert self._process is not None
            code = await asyncio.shield(self._process.exited)
            end = self._hang_reason if self._hang_reason is not None else exit_description(code)
            self._state, self._why = "dead", f"the engine {end}"
            self._on_lost(f"{self._why} before the request was done")
            failed = await self._process.failure()
            self._process.close()
            log.error("The engine (process %d) %s%s", self._process.pid, end,
                      f":\n{failed.message.rstrip()}" if failed is not None else "")
            if not self._restart:
                self.gave_up = True
                return
            quick_deaths = quick_deaths + 1 if time.monotonic() - self.info.started < QUICK_DEATH_SECONDS else 1
            if not await self._start_again(quick_deaths):
                return

    async def _start_again(self, quick_deaths: int) -> bool:
        while quick_deaths <= MAX_QUICK_DEATHS:
            backoff = 0.0 if quick_deaths == 1 else FIRST_BACKOFF_SECONDS * 2 ** (quick_deaths - 2)
            await asyncio.sleep(min(backoff, LONGEST_BACKOFF_SECONDS))
            self.restarts += 1
            try:
                await self._launch()
            except SpilloverError as error:
                self._why = str(error)
                log.error("The engine could not be restarted: %s", error)
                quick_deaths += 1
            else:
                log.info("The engine is ready again (process %d)", self.info.pid)
                return True
        self.gave_up = True
        log.critical("The engine has died or failed to start %d times in a row; giving up. Last: %s",
                     quick_deaths, self._why)
        return False

    async def _watch(self) -> None:
        """Monitor the heartbeat of the current engine, and kill the engine if it hangs."""
        degraded = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            process = self._process
            if process is None or process.exited.done() or self._hang_reason is not None:
                continue
            process.heartbeat.poll()
            if degraded != (self.state == "hung"):
                degraded = not degraded
                log.warning("%s", self.trouble if degraded else "The engine sends heartbeats again")
            self._hang_reason = process.heartbeat.hang(self.limits)
            if self._hang_reason is not None:
                self.hangs += 1
                log.error("The engine (process %d) %s; it is killed", process.pid, self._hang_reason)
                process.kill()
