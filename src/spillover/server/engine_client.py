"""The engine as the front sees it: starts it, hands it requests, streams their answers, starts it again when it dies.

Everything here runs on one event loop. The engine's messages are taken in as they come and kept as state, not in
queues: a reader that is slow finds the newest state when it looks again, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from spillover.engine.config import EngineConfig
from spillover.engine.output_processor import Answer
from spillover.engine.request import Request
from spillover.engine.request_factory import RequestFactory
from spillover.errors import RequestError, SpilloverError
from spillover.models.config import ModelConfig
from spillover.models.store import resolve
from spillover.models.tokenizer import Tokenizer, load_tokenizer
from spillover.plan.planner import Plan
from spillover.server.protocol import (
    Abort,
    Call,
    Failed,
    FromEngine,
    LiveStats,
    Method,
    Planned,
    Progress,
    Ready,
    Reply,
    Step,
    Update,
)
from spillover.server.supervisor import EngineProcess, describe_exit
from spillover.server.wire import encode, encode_add, mirror

log = logging.getLogger("spillover.server")

EngineState = Literal["starting", "ready", "sleeping", "dead"]

START_SECONDS = 900.0  # an engine that starts may be silent for this long: a large model from a slow disk
SILENT_SECONDS = 900.0  # and one that has work for this long; then it is taken for stuck, and killed
QUICK_DEATH_SECONDS = 60.0  # an engine that lived for less counts against MAX_QUICK_DEATHS
MAX_QUICK_DEATHS = 5  # in a row, then it is not started again
FIRST_BACKOFF_SECONDS = 0.5  # before the second restart in a row; doubled for each one after, up to ...
LONGEST_BACKOFF_SECONDS = 30.0
MAX_RETRY_AFTER = 60  # seconds


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


@dataclass(eq=False)
class _Open:
    """An answer that is being made."""

    answer: Answer
    ids: list[int]
    grown: asyncio.Event
    error: SpilloverError | None = None

    def fail(self, error: SpilloverError) -> None:
        self.error = error
        self.grown.set()


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
        self.max_queue = max_queue
        self._config = config
        self._restart = restart
        self._on_plan = on_plan
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._state: EngineState = "starting"
        self._why_dead = "the engine is starting"
        self._gave_up = False
        self._restarts = 0
        self._heard = time.monotonic()  # when the engine last said something
        self._stats = LiveStats()
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[_Open, Request]] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._ended: deque[float] = deque(maxlen=256)  # when the last sequences ended
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._drain_until = math.inf

    # Starting and stopping

    async def start(self) -> None:
        """Spawn the engine and wait until it is ready; SpilloverError with its own sentence if it cannot start."""
        try:
            path = await asyncio.to_thread(resolve, self._config.model)
            launched = asyncio.ensure_future(self._launch())
            try:
                self.tokenizer = None
                if not self._config.skip_tokenizer_init:
                    self.tokenizer = await asyncio.to_thread(load_tokenizer, self._config.tokenizer or path)
                await launched
            finally:
                launched.cancel()
                await asyncio.wait([launched])
        except BaseException:
            await self.stop()
            raise
        self.factory = RequestFactory(self.info.model_config, self.tokenizer, self.info.max_model_len,
                                      self._config.seed, compile_grammars=False)
        self._tasks = [asyncio.create_task(self._keep_running()), asyncio.create_task(self._watch_for_silence())]

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, give those that run `drain_seconds` to end, then stop. Nothing is left behind.

        Calling it again while it drains can only shorten the wait.
        """
        self._drain_until = min(self._drain_until, time.monotonic() + drain_seconds)
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        while self._open and self._state == "ready" and time.monotonic() < self._drain_until:
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the server is stopping", retry_after=10)
        if self._process is not None:
            await self._process.stop()
        self._state, self._why_dead = "dead", "the server has stopped"

    async def _launch(self) -> None:
        """A new engine process, until it is ready. SpilloverError if it is not to be."""
        self._state, self._why_dead = "starting", "the engine is starting"
        self._heard = time.monotonic()
        self._ready = asyncio.get_running_loop().create_future()
        process = self._process = EngineProcess(self._config, self._on_message)
        try:
            while True:
                awaited: list[asyncio.Future[Any]] = [self._ready, process.exited]
                await asyncio.wait(awaited, timeout=START_SECONDS / 10,
                                   return_when=asyncio.FIRST_COMPLETED)
                if self._ready.done():
                    break
                if process.exited.done():
                    raise SpilloverError(self._start_failure(process.exited.result(), await process.last_words()))
                if time.monotonic() - self._heard > START_SECONDS:
                    raise SpilloverError(f"the engine has not said a word for {START_SECONDS:.0f} s while starting")
        except BaseException:
            self._state = "dead"
            process.close()
            raise
        ready = self._ready.result()
        self._stats = LiveStats()
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
            restarts=self._restarts,
            null_model=ready.config.load_format == "null",
        )
        self._state = "ready"

    def _start_failure(self, code: int, failed: Failed | None) -> str:
        if failed is None:
            return f"the engine {describe_exit(code)} while starting"
        if failed.expected:
            return failed.message
        log.error("The engine failed while starting:\n%s", failed.message.rstrip())
        return f"the engine failed while starting: {failed.message.strip().splitlines()[-1]}"

    # Keeping it running

    async def _keep_running(self) -> None:
        quick_deaths = 0
        while True:
            assert self._process is not None
            code = await asyncio.shield(self._process.exited)
            self._state, self._why_dead = "dead", f"the engine {describe_exit(code)}"
            self._fail_all(f"{self._why_dead} before the request was done")
            failed = await self._process.last_words()
            self._process.close()
            log.error("The engine (process %d) %s%s", self._process.pid, describe_exit(code),
                      f":\n{failed.message.rstrip()}" if failed is not None else "")
            if not self._restart:
                self._gave_up = True
                return
            quick_deaths = quick_deaths + 1 if time.monotonic() - self.info.started < QUICK_DEATH_SECONDS else 1
            if not await self._start_again(quick_deaths):
                return

    async def _start_again(self, quick_deaths: int) -> bool:
        while quick_deaths <= MAX_QUICK_DEATHS:
            backoff = 0.0 if quick_deaths == 1 else FIRST_BACKOFF_SECONDS * 2 ** (quick_deaths - 2)
            await asyncio.sleep(min(backoff, LONGEST_BACKOFF_SECONDS))
            self._restarts += 1
            try:
                await self._launch()
            except SpilloverError as error:
                self._why_dead = str(error)
                log.error("The engine could not be started again: %s", error)
                quick_deaths += 1
            else:
                log.info("The engine is ready again (process %d)", self.info.pid)
                return True
        self._gave_up = True
        log.critical("The engine has died or failed to start %d times in a row; giving up. Last: %s",
                     quick_deaths, self._why_dead)
        return False

    async def _watch_for_silence(self) -> None:
        """An engine with work that says nothing for a long time is stuck: killed here, and started again."""
        while True:
            await asyncio.sleep(SILENT_SECONDS / 20)
            silent = time.monotonic() - self._heard
            if self._open and self._state == "ready" and not self._stats.sleeping and silent > SILENT_SECONDS:
                log.error("The engine has work but has said nothing for %.0f s; it is killed", silent)
                assert self._process is not None
                self._process.kill()

    def _fail_all(self, message: str, retry_after: int = 2) -> None:
        for entry, _ in self._open.values():
            entry.fail(EngineDead(message, retry_after))
        self._open.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(message, retry_after))
        self._calls.clear()

    # Looking

    @property
    def ready(self) -> bool:
        """Requests are taken; also while the engine sleeps, though they wait then."""
        return self._state == "ready" and self._stopping is None

    @property
    def engine_state(self) -> EngineState:
        return "sleeping" if self._state == "ready" and self._stats.sleeping else self._state

    @property
    def is_sleeping(self) -> bool:
        return self.engine_state == "sleeping"

    @property
    def gave_up(self) -> bool:
        """The engine is dead and will not be started again."""
        return self._gave_up

    @property
    def num_open(self) -> int:
        """Sequences that have been handed to the engine and have not ended."""
        return len(self._open)

    def latest(self) -> LiveStats:
        """The engine's state as it last told; never older than 0.25 s while it works."""
        return self._stats

    # Asking

    async def generate(self, requests: list[Request], prompt: str | None = None, *,
                       stream: bool = True) -> AsyncGenerator[Answer, None]:
        """The same Answer each time it has grown, the last time with `finished`; without `stream` only that last time.

        `requests` are the n sequences that `factory.make` made of one request. Leaving the iterator early (break
        inside `contextlib.aclosing`, cancellation, aclose) ends the requests at once. The first step of the iteration
        raises QueueFull, EngineDead, or RequestError for a request that the engine refuses (a grammar that does not
        compile); a later one raises EngineDead if the engine dies.
        """
        entry = self._submit(requests, prompt)
        try:
            while True:
                await entry.grown.wait()
                entry.grown.clear()
                if entry.error is not None:
                    raise entry.error
                finished = entry.answer.finished
                if finished or stream:
                    yield entry.answer
                if finished:
                    return
        finally:
            self._abort([id for id in entry.ids if id in self._open])

    async def call(self, method: Method, timeout: float = 120.0) -> LiveStats:
        """stats, reset_prefix_cache, sleep or wake_up; the engine's state after it. EngineDead, or SpilloverError."""
        self._stats = msgspec.convert(await self.ask(method, timeout=timeout), LiveStats)
        return self._stats

    async def ask(self, method: Method, argument: str = "", timeout: float = 120.0) -> Any:
        """What the engine replies to a call. EngineDead, or SpilloverError."""
        process = self._serving()
        id = next(self._ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[id] = future
        try:
            process.send(encode(Call(id, method, argument)))
            reply = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise SpilloverError(f"the engine has not answered {method} within {timeout:.0f} s") from None
        finally:
            self._calls.pop(id, None)
        if reply.error is not None:
            raise SpilloverError(reply.error)
        return reply.value

    def _submit(self, requests: list[Request], prompt: str | None) -> _Open:
        process = self._serving()
        self._check_queue(len(requests))
        named = {next(self._ids): request for request in requests}
        message = encode_add(named)
        entry = _Open(Answer(requests, prompt, self.tokenizer), list(named), asyncio.Event())
        for id, request in named.items():
            self._open[id] = (entry, request)
        process.send(message)
        return entry

    def _serving(self) -> EngineProcess:
        if self._stopping is not None:
            raise EngineDead("the server is stopping", retry_after=10)
        if self._state != "ready" or self._process is None:
            if self._gave_up:
                raise EngineDead(f"{self._why_dead}, and is not started again", MAX_RETRY_AFTER)
            raise EngineDead(f"{self._why_dead}; try again soon")
        return self._process

    def _check_queue(self, count: int) -> None:
        waiting = len(self._open) + count - self.info.plan.max_num_seqs
        if self._open and waiting > self.max_queue:  # alone, a request is served whatever its n
            raise QueueFull(f"{len(self._open)} sequences run or wait already, and at most "
                            f"{self.info.plan.max_num_seqs} run and {self.max_queue} wait; try again later",
                            self._retry_after(waiting - self.max_queue))

    def _retry_after(self, count: int) -> int:
        """Seconds until `count` sequences will have ended, at the rate of the last ones."""
        if len(self._ended) < 2:
            return 1
        rate = len(self._ended) / max(time.monotonic() - self._ended[0], 1e-3)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(count / rate)))

    def _abort(self, ids: list[int], reason: str = "abort") -> None:
        for id in ids:
            self._open.pop(id, None)
        if ids and self._process is not None:
            self._process.send(encode(Abort(ids, reason)))

    # Hearing

    def _on_message(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case Step():
                self._on_step(message)
            case Reply():
                call = self._calls.get(message.id)
                if call is not None and not call.done():
                    call.set_result(message)
            case Progress():
                if self._on_progress is not None and self._restarts == 0:
                    self._on_progress(message.stage, message.done, message.total)
            case Planned():
                if self._on_plan is not None and self._restarts == 0:
                    self._on_plan(message.plan)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)

    def _on_step(self, step: Step) -> None:
        stopped = []
        for update in step.updates:
            found = self._open.get(update.id)
            if found is None:  # it was aborted while the step ran
                continue
            entry, request = found
            if self._grow(entry, request, update):
                stopped.append(update.id)
            if request.finish_reason is not None:
                self._ended.append(self._heard)
                self._open.pop(update.id, None)
            entry.grown.set()
        if stopped:
            self._abort(stopped, "stop")
        if step.stats is not None:
            self._stats = step.stats

    def _grow(self, entry: _Open, request: Request, update: Update) -> bool:
        """Take in what is new of a sequence; True if a stop string ends it, of which the engine does not know."""
        mirror(request, update)
        if update.error is not None:
            entry.error = RequestError(update.error)
            return False
        try:
            stop_string = entry.answer.advance(request)
        except Exception:  # one sequence's text must not be the end of the others
            log.exception("The text of a request could not be made")
            entry.error = SpilloverError("the text of this request could not be made")
            request.finish_reason, unfinished = "error", request.finish_reason is None
            return unfinished
        if stop_string is None or request.stop_reason is not None:
            return False
        unfinished = request.finish_reason is None
        request.finish_reason, request.stop_reason = "stop", stop_string
        request.finished = self._heard
        return unfinished
