"""`AsyncLLM`: a model in a separate process with an asynchronous interface, for the server or for other programs.

All of it runs on one event loop. The engine's messages are applied as they arrive and kept as state, not in queues: a
slow reader sees the newest state when it looks again, and delays no other. Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any, Literal

import msgspec

from spillover.engine.config import EngineConfig
from spillover.engine.output.output_processor import Answer
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.requests.prompts import Message, Prompt, conversation, params_for, prompt_parts
from spillover.engine.requests.request import Request
from spillover.engine.requests.request_factory import RequestFactory
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import EngineDead, QueueFull, RequestError, SpilloverError
from spillover.models.generation_config import sampling_defaults
from spillover.models.hub.store import resolve
from spillover.models.tokenizer import Tokenizer, load_tokenizer
from spillover.plan.planner import Plan
from spillover.server.engine.engine_keeper import MAX_RETRY_AFTER, EngineInfo, EngineKeeper
from spillover.server.engine.heartbeat import HangLimits
from spillover.server.engine.protocol import Abort, Call, LiveStats, Method, Reply, Step, Update
from spillover.server.engine.supervisor import EngineProcess
from spillover.server.engine.wire import encode, encode_add, mirror

log = logging.getLogger("spillover.server")

EngineState = Literal["starting", "ready", "sleeping", "hung", "dead"]

INLINE_CHARACTERS = 4096  # longer prompts are prepared in a thread, as tokenising them would stall every stream


@dataclass(eq=False)
class _OpenRequest:
    """An answer that is being generated."""

    answer: Answer
    ids: list[int]
    grown: asyncio.Event
    error: SpilloverError | None = None

    def fail(self, error: SpilloverError) -> None:
        self.error = error
        self.grown.set()


class AsyncLLM:
    """A model in a separate process, restarted when it dies or hangs; every engine flag is a keyword argument.

        async with AsyncLLM("path/to/model", gpu_memory="8GB") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(temperature=0)):
                print(output.outputs[0].text)

    Any number of tasks of the event loop that started it may use it at once.
    """

    factory: RequestFactory  # set by start(); its make() checks and names requests, which takes long for long texts
    tokenizer: Tokenizer | None = None  # set by start(); None with skip_tokenizer_init

    def __init__(self, model: str | PathLike[str] | None = None, *, max_queue: int = 1024, restart: bool = True,
                 limits: HangLimits | None = None, on_plan: Callable[[Plan], None] | None = None,
                 on_progress: Callable[[str, int, int], None] | None = None, **flags: Any) -> None:
        """Create a client, not started yet. Up to `max_queue` sequences may wait in addition to those that run. With
        `restart` an engine that died, or hung by `limits`, is started again. `on_plan` is called with the plan before
        anything is loaded, `on_progress` with (stage, amount done, total) during the start.
        """
        self.max_queue = max_queue
        self._config = EngineConfig.from_flags(model=model, **flags)
        self._keeper = EngineKeeper(self._config, limits=limits or HangLimits(), restart=restart,
                                    on_message=self._on_message, on_lost=self._fail_all, on_plan=on_plan,
                                    on_progress=on_progress)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = LiveStats()
        self._default_params = SamplingParams()  # replaced by the model's defaults in start()
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[_OpenRequest, Request]] = {}
        self._by_request_id: dict[str, _OpenRequest] = {}  # requests of generate() and chat(), by request_id
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._ended: deque[float] = deque(maxlen=256)  # times at which the last sequences finished
        self._stopping: asyncio.Task[None] | None = None
        self._drain_until = math.inf

    # Starting and stopping

    async def start(self) -> AsyncLLM:
        """Start the engine and wait until it is ready; raise SpilloverError with the reason if it cannot start."""
        if self._loop is not None:
            raise SpilloverError("an AsyncLLM is started once; make a new one")
        self._loop = asyncio.get_running_loop()
        try:
            path = await asyncio.to_thread(resolve, self._config.model)
            launched = asyncio.ensure_future(self._keeper.start())
            try:
                if not self._config.skip_tokenizer_init:
                    self.tokenizer = await asyncio.to_thread(load_tokenizer, self._config.tokenizer or path,
                                                             self._config.chat_template)
                await launched
            finally:
                launched.cancel()
                await asyncio.wait([launched])
        except BaseException:
            await self.close()
            raise
        self.factory = RequestFactory(self.info.model_config, self.tokenizer, self.info.max_model_len,
                                      self._config.seed, compile_grammars=False,
                                      sampling_defaults=sampling_defaults(path, self._config.generation_config))
        self._default_params = SamplingParams(**self.factory.sampling_defaults)
        return self

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for up to `drain_seconds`, then stop the engine process.

        Calling it again while it drains can only shorten the wait.
        """
        self._drain_until = min(self._drain_until, time.monotonic() + drain_seconds)
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    async def _stop(self) -> None:
        while self._open and self._keeper.state == "ready" and time.monotonic() < self._drain_until:
            await asyncio.sleep(0.02)
        self._fail_all("the engine is stopping", retry_after=10)
        await self._keeper.stop("the engine has stopped")

    # Requests

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
                 priority: int = 0, cache_salt: str | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer to one prompt whenever it has grown; the last result is `finished`.

        Leaving the iterator early (break inside `contextlib.aclosing`, cancellation, aclose) aborts the request, and so
        does `abort(request_id)`. Raises RequestError for a request that cannot be served, QueueFull, and EngineDead if
        the engine is not available or dies; the request can then be sent again.
        """
        params = params_for(1, sampling_params, self.get_default_sampling_params())[0]
        text, ids = prompt_parts(prompt)

        def make() -> tuple[str | None, list[Request]]:
            return text, self.factory.make(text, ids, params, priority, cache_salt, request_id)

        return self._outputs(len(text or ids or ()), make, request_id)

    def chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None,
             request_id: str | None = None, *, tools: Sequence[Mapping[str, Any]] | None = None, priority: int = 0,
             cache_salt: str | None = None, **template_options: Any) -> AsyncGenerator[RequestOutput, None]:
        """Answer messages through the model's chat template; otherwise the same as `generate`."""
        params = params_for(1, sampling_params, self.get_default_sampling_params())[0]
        messages = conversation(messages)

        def make() -> tuple[str | None, list[Request]]:
            ids = self.factory.render(messages, tools, **template_options)
            return None, self.factory.make(None, ids, params, priority, cache_salt, request_id)

        return self._outputs(None, make, request_id)  # the time of a chat template is bounded, but not short

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling_params of a request: SamplingParams() with the model's generation config."""
        return self._default_params

    async def abort(self, request_id: str) -> None:
        """Abort the request of `generate` or `chat` with this id; its last result has the finish reason "abort"."""
        entry = self._by_request_id.get(request_id)
        if entry is None:  # it has finished already
            return
        for request in entry.answer.requests:
            request.finish_reason = request.finish_reason or "abort"
            request.finished = request.finished or time.monotonic()
        self._abort([id for id in entry.ids if id in self._open])
        entry.grown.set()

    async def stats(self) -> LiveStats:
        """Return the engine's state and its counters since its start."""
        return await self.call("stats")

    async def reset_prefix_cache(self) -> None:
        await self.call("reset_prefix_cache")

    async def sleep(self) -> None:
        """Move the weights to the host, keeping the KV cache. Requests wait until `wake_up`."""
        await self.call("sleep")

    async def wake_up(self) -> None:
        await self.call("wake_up")

    # State

    @property
    def info(self) -> EngineInfo:
        """Return the current or last engine's info; AttributeError before the first engine is ready."""
        return self._keeper.info

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop that started the client; None before start()."""
        return self._loop

    @property
    def ready(self) -> bool:
        """Return whether requests are accepted; also True while the engine sleeps, though they wait then."""
        return self.trouble is None

    @property
    def trouble(self) -> str | None:
        """Return why requests are not accepted now; None if they are."""
        return self._keeper.trouble if self._stopping is None else "the engine is stopping"

    @property
    def engine_state(self) -> EngineState:
        state = self._keeper.state
        return "sleeping" if state == "ready" and self._stats.sleeping else state

    @property
    def is_sleeping(self) -> bool:
        return self.engine_state == "sleeping"

    @property
    def gave_up(self) -> bool:
        """Return whether the engine is dead and will not be restarted."""
        return self._keeper.gave_up

    @property
    def heartbeat_age(self) -> float:
        """Return the seconds since the engine last gave a sign of life."""
        return self._keeper.heartbeat_age

    @property
    def hangs(self) -> int:
        """Return the number of engines that were killed because they hung."""
        return self._keeper.hangs

    @property
    def num_open(self) -> int:
        """Return the number of sequences that were sent to the engine and have not finished."""
        return len(self._open)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Return the prompt tokens of sequences without output tokens: an upper bound of those left to compute."""
        return sum(request.num_prompt for _, request in self._open.values() if not request.output_token_ids)

    def latest_stats(self) -> LiveStats:
        """Return the engine's last reported state; at most 0.25 s old while the engine works."""
        return self._stats

    # Used by the server's routes

    async def answers(self, requests: list[Request], prompt: str | None = None, *, stream: bool = True,
                      name: str | None = None) -> AsyncGenerator[Answer, None]:
        """Yield the same Answer each time it has grown, the last time `finished`; without `stream` only the last time.

        `requests` are the n sequences that `factory.make` made of one request; `name` is its id for `abort`. Otherwise
        the same as `generate`.
        """
        if name is not None and name in self._by_request_id:
            raise RequestError(f"a request with the id '{name}' runs already; give each one its own")
        entry = self._submit(requests, prompt)
        if name is not None:
            self._by_request_id[name] = entry
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
            if name is not None:
                del self._by_request_id[name]

    async def call(self, method: Method, timeout: float = 120.0) -> LiveStats:
        """Call stats, reset_prefix_cache, sleep or wake_up; return the engine's state. EngineDead or SpilloverError."""
        self._stats = msgspec.convert(await self.ask(method, timeout=timeout), LiveStats)
        return self._stats

    async def ask(self, method: Method, argument: str = "", timeout: float = 120.0) -> Any:
        """Return the engine's reply to a call. Raises EngineDead or SpilloverError."""
        process = self._check_serving()
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

    # One request

    async def _outputs(self, size: int | None, make: Callable[[], tuple[str | None, list[Request]]],
                       request_id: str | None) -> AsyncGenerator[RequestOutput, None]:
        self._check_serving()
        inline = size is not None and size <= INLINE_CHARACTERS
        text, requests = make() if inline else await asyncio.to_thread(make)
        async with aclosing(self.answers(requests, text, name=request_id)) as answers:
            async for answer in answers:
                yield answer.output()

    def _submit(self, requests: list[Request], prompt: str | None) -> _OpenRequest:
        process = self._check_serving()
        self._check_queue(len(requests))
        named = {next(self._ids): request for request in requests}
        message = encode_add(named)
        entry = _OpenRequest(Answer(requests, prompt, self.tokenizer), list(named), asyncio.Event())
        for id, request in named.items():
            self._open[id] = (entry, request)
        process.send(message)
        return entry

    def _check_serving(self) -> EngineProcess:
        self._check_loop()
        if self._stopping is not None:
            raise EngineDead("the engine is stopping", retry_after=10)
        return self._keeper.serving()

    def _check_loop(self) -> None:
        if self._loop is None:
            raise SpilloverError("the AsyncLLM is not started; use `async with AsyncLLM(...) as llm:`, or await "
                                 "llm.start() first")
        if asyncio.get_running_loop() is not self._loop:
            raise SpilloverError("an AsyncLLM belongs to the event loop that started it; use it from its tasks")

    def _check_queue(self, count: int) -> None:
        waiting = len(self._open) + count - self.info.plan.max_num_seqs
        if self._open and waiting > self.max_queue:  # a request that is the only one is accepted whatever its n
            raise QueueFull(f"{len(self._open)} sequences run or wait already, and at most "
                            f"{self.info.plan.max_num_seqs} run and {self.max_queue} wait; try again later",
                            self._retry_after(waiting - self.max_queue))

    def _retry_after(self, count: int) -> int:
        """Return the estimated seconds until `count` sequences have finished, at the rate of the last ones."""
        if len(self._ended) < 2:
            return 1
        rate = len(self._ended) / max(time.monotonic() - self._ended[0], 1e-3)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(count / rate)))

    def _abort(self, ids: list[int], reason: str = "abort") -> None:
        for id in ids:
            self._open.pop(id, None)
        if ids:
            self._keeper.send(encode(Abort(ids, reason)))

    # Messages from the engine

    def _fail_all(self, message: str, retry_after: int = 2) -> None:
        self._stats = msgspec.structs.replace(self._stats, sleeping=False, num_running=0, num_waiting=0)
        for entry, _ in self._open.values():
            entry.fail(EngineDead(message, retry_after))
        self._open.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(message, retry_after))
        self._calls.clear()

    def _on_message(self, message: Step | Reply) -> None:
        if isinstance(message, Step):
            self._on_step(message)
        else:
            call = self._calls.get(message.id)
            if call is not None and not call.done():
                call.set_result(message)

    def _on_step(self, step: Step) -> None:
        stopped, now = [], time.monotonic()
        for update in step.updates:
            found = self._open.get(update.id)
            if found is None:  # it was aborted while the step ran
                continue
            entry, request = found
            if self._apply_update(entry, request, update, now):
                stopped.append(update.id)
            if request.finish_reason is not None:
                self._ended.append(now)
                self._open.pop(update.id, None)
            entry.grown.set()
        if stopped:
            self._abort(stopped, "stop")
        if step.stats is not None:
            self._stats = step.stats

    def _apply_update(self, entry: _OpenRequest, request: Request, update: Update, now: float) -> bool:
        """Apply a sequence's update; return True if a stop string ended it, which the engine does not know yet."""
        mirror(request, update)
        if update.error is not None:
            entry.error = RequestError(update.error)
            return False
        try:
            stop_string = entry.answer.advance(request)
        except Exception:  # an error in one sequence's text must not fail the others
            log.exception("The text of a request could not be made")
            entry.error = SpilloverError("the text of this request could not be made")
            request.finish_reason, unfinished = "error", request.finish_reason is None
            return unfinished
        if stop_string is None or request.stop_reason is not None:
            return False
        unfinished = request.finish_reason is None
        request.finish_reason, request.stop_reason = "stop", stop_string
        request.finished = now
        return unfinished
