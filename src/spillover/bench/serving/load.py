"""The load generator: sends a workload's requests at their times and records every event of the answers.

This module is one event loop in one process; `load_processes.run_load` starts several where one is too slow. Times are
absolute: a request that is sent late does not delay the next one. Nothing is averaged here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from spillover.bench.records import RequestRecord
from spillover.bench.serving.flight import Flight, sleep_until
from spillover.bench.serving.http_client import Call, Connection
from spillover.bench.serving.openai_api import (
    PATHS,
    TIMINGS_HEADER,
    Answer,
    Conversation,
    Dialect,
    tokenize_bodies,
    tokens_of,
)
from spillover.bench.serving.saturation import SaturationWatch
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.workloads.arrivals import Arrivals
from spillover.errors import SpilloverError

TICK_SECONDS = 0.02  # seconds between two measurements of the event loop's delay
PROGRESS_SECONDS = 0.25  # seconds between two progress reports
OVER_SATURATED = "over-saturated: requests came faster than they were answered"


@dataclass(frozen=True)
class LoadOptions:
    """The options of a run: how load is generated."""

    base_url: str = "http://127.0.0.1:8000"
    arrivals: Arrivals = field(default_factory=Arrivals)
    dialect: Dialect = field(default_factory=Dialect)
    endpoint: str | None = None  # path; None for the dialect's usual one
    headers: tuple[tuple[str, str], ...] = ()
    insecure: bool = False  # whether to skip verification of the TLS certificate
    timeout: float = 6 * 3600.0  # timeout of one request in seconds
    seconds: float | None = None  # seconds after which nothing more is sent; requests in flight still finish
    stop_when_saturated: bool = False  # whether to send nothing more once requests pile up
    keep_text: bool = False
    processes: int | None = None  # number of client processes; None to choose it from the rate
    read_counters: bool = True  # whether to read the server's counters before and after
    details: Mapping[str, Any] = field(default_factory=dict)  # entries that are copied into the run's details

    @property
    def path(self) -> str:
        return urlsplit(self.base_url).path.rstrip("/") + (self.endpoint or PATHS[self.dialect.kind])

    def address(self) -> SplitResult:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpilloverError(f"--base-url is like http://127.0.0.1:8000; got '{self.base_url}'")
        return parts


@dataclass(frozen=True)
class Chain:
    """Requests of which each waits for the previous one: the turns of a session, or a single request."""

    turns: tuple[tuple[int, ServeRequest], ...]  # (index in the workload, request)
    at: float | None  # when the first turn is due, in seconds after the start; None in closed loop


@dataclass(frozen=True)
class Live:
    """The state of a run in progress, for display."""

    seconds: float = 0.0
    total: int = 0
    sent: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0  # sum over the requests that have a first token

    @property
    def running(self) -> int:
        return self.sent - self.completed - self.failed

    def plus(self, other: Live) -> Live:
        return Live(max(self.seconds, other.seconds), self.total + other.total, self.sent + other.sent,
                    self.completed + other.completed, self.failed + other.failed,
                    self.output_tokens + other.output_tokens, self.first_tokens + other.first_tokens,
                    self.first_token_seconds + other.first_token_seconds)


@dataclass(frozen=True)
class Share:
    """The results of one client process."""

    records: tuple[RequestRecord, ...]
    lags: tuple[float, ...]  # seconds from when each request could be sent to when it was
    delays: tuple[float, ...]  # seconds by which the event loop was late, sampled
    busy: float  # share of the time in which the loop's thread used the CPU
    stopped: str | None = None


def chains(requests: Sequence[ServeRequest], arrivals: Arrivals) -> list[Chain]:
    """Group requests into chains, one per session, each due at the time of its first turn."""
    grouped: dict[tuple[str, int], list[tuple[int, ServeRequest]]] = {}
    for index, request in enumerate(requests):
        key = ("alone", index) if request.session is None else ("session", request.session)
        grouped.setdefault(key, []).append((index, request))
    strung = [sorted(turns, key=lambda pair: pair[1].turn) for turns in grouped.values()]
    own = [turns[0][1].at for turns in strung]
    closed, times = arrivals.is_closed(own), arrivals.times(own)
    made = [Chain(tuple(turns), None if closed else at) for turns, at in zip(strung, times, strict=True)]
    return made if closed else sorted(made, key=lambda chain: chain.at or 0.0)


def run_share(share: Sequence[Chain], options: LoadOptions, begin: Callable[[], float],
              report_progress: Callable[[Live], None]) -> Share:
    """Run a share of the load and return when all answers have arrived. `begin` is called once connections are open and
    returns the time of `time.perf_counter()` that counts as 0; it is the same for all processes."""
    with _quiet_memory(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        loop = runner.get_loop()
        running = loop.create_task(_Generator(share, options, report_progress).run(begin))
        with _interrupted_by(lambda: loop.call_soon_threadsafe(running.cancel)):
            return loop.run_until_complete(running)


class _Generator:
    def __init__(self, share: Sequence[Chain], options: LoadOptions, report_progress: Callable[[Live], None]) -> None:
        parts = options.address()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = _tls(options.insecure) if parts.scheme == "https" else None
        self._headers = (("Content-Type", "application/json"), TIMINGS_HEADER, *options.headers)
        self._share, self._options, self._report_progress = share, options, report_progress
        most = options.arrivals.max_concurrency
        self._limit = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._start = 0.0
        self._idle: list[Connection] = []
        self._records: list[RequestRecord] = []
        self._lags: list[float] = []
        self._delays: list[float] = []
        self._stopped: str | None = None
        self._watch = SaturationWatch() if options.stop_when_saturated else None
        self._total = sum(len(chain.turns) for chain in share)
        self._sent = self._completed = self._failed = self._tokens = self._firsts = 0
        self._first_seconds = 0.0

    async def run(self, begin: Callable[[], float]) -> Share:
        await self._open_connections()
        self._start = begin()
        await sleep_until(self._start)
        ticking = asyncio.create_task(self._tick())
        busy, begun = time.thread_time(), time.perf_counter()
        together = self._options.arrivals.static_batch_size or len(self._share) or 1
        try:
            for first in range(0, len(self._share), together):
                async with asyncio.TaskGroup() as group:
                    for chain in self._share[first:first + together]:
                        if chain.at is not None:
                            await sleep_until(self._start + chain.at)
                        if self._over():
                            break
                        group.create_task(self._run_chain(chain))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            elapsed = max(1e-9, time.perf_counter() - begun)
            busy = min(1.0, (time.thread_time() - busy) / elapsed)
            ticking.cancel()
            for connection in self._idle:
                await connection.close()
        self._report_progress(self._live())
        return Share(tuple(self._records), tuple(self._lags), tuple(self._delays), busy, self._stopped)

    async def _run_chain(self, chain: Chain) -> None:
        conversation = Conversation(self._options.dialect.kind)
        due = None if chain.at is None else self._start + chain.at
        for turn, (index, request) in enumerate(chain.turns):
            if turn:
                wake = time.perf_counter() + request.think
                if due is not None and request.at is not None and self._options.arrivals.self_timed:
                    wake = max(wake, self._start + request.at)
                await sleep_until(wake)
                due = None if due is None else wake
            async with self._limit:
                if self._over():
                    return
                failure = await self._request(index, request, conversation, due, turn + 1 < len(chain.turns))
            if failure is not None:
                self._give_up(chain.turns[turn + 1:], failure)
                return

    async def _request(self, index: int, request: ServeRequest, conversation: Conversation, due: float | None,
                       has_next_turn: bool) -> str | None:
        """Send one request and read its answer. Return why its session cannot continue, or None if it can."""
        ready = time.perf_counter()  # any delay from here on is the client's own
        options = self._options
        ids_matter = has_next_turn and not isinstance(request.prompt, str)
        body = options.dialect.body(request, conversation.next_prompt(request), ids_matter)
        call = Call("POST", options.path, body, self._headers)
        connection = self._idle.pop() if self._idle else Connection(self._host, self._port, self._tls)
        flight = Flight(connection, self._on_tokens)
        self._sent += 1
        reusable = await flight.run(call, options.timeout)
        done = time.perf_counter()
        if reusable:
            self._idle.append(connection)
        sent, scheduled = flight.sent or done, ready if due is None else due
        if flight.sent is not None:
            self._lags.append(max(0.0, sent - max(scheduled, ready)))
        record = self._record(index, request, flight.answer, scheduled, sent, done)
        self._records.append(record)
        self._completed += record.ok
        self._failed += not record.ok
        if record.ok and has_next_turn:
            ids = flight.answer.token_ids
            if ids_matter and not ids:
                ids = await self._tokenize(flight.answer.text)
            if ids_matter and not ids:
                return "the server does not return the token ids of its answers, which the next prompt needs"
            conversation.add_answer(flight.answer.text, ids)
        return record.error

    def _record(self, index: int, request: ServeRequest, answer: Answer, scheduled: float, sent: float,
                done: float) -> RequestRecord:
        start = self._start
        known = answer.output_tokens if answer.output_tokens is not None else len(answer.token_ids) or None
        chunks = tuple((at - start, count) for at, count in answer.chunks(known))
        return RequestRecord(
            index, scheduled - start, sent - start, chunks, done - start,
            prompt_tokens=request.prompt_len if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=sum(count for _, count in chunks) if known is None else known,
            requested_output_len=request.output_len,
            error=answer.error or (None if chunks else "the answer has no tokens"),
            sources=answer.sources, timings=answer.timings, session=request.session, turn=request.turn,
            text=answer.text if self._options.keep_text else "")

    def _give_up(self, turns: Sequence[tuple[int, ServeRequest]], why: str) -> None:
        now = time.perf_counter() - self._start
        for index, request in turns:
            self._sent += 1
            self._failed += 1
            self._records.append(RequestRecord(index, now, now, (), now, request.prompt_len, 0, request.output_len,
                                               f"not sent, because the previous turn failed: {why}",
                                               session=request.session, turn=request.turn))

    async def _tokenize(self, text: str) -> list[int]:
        """Return the token ids of an answer from the server's tokenizer, for servers that do not send them."""
        connection = Connection(self._host, self._port, self._tls)
        try:
            for body in tokenize_bodies(text, self._options.dialect.model):
                reply = await connection.send(Call("POST", "/tokenize", body, self._headers))
                ids = tokens_of(await connection.read(reply)) if reply.status == 200 else []
                if ids:
                    return ids
        except (OSError, ValueError):
            return []
        finally:
            await connection.close()
        return []

    def _on_tokens(self, since: float, tokens: int, first: bool) -> None:
        self._tokens += tokens
        if first:
            self._firsts += 1
            self._first_seconds += since
            if self._watch is not None:
                self._watch.note(time.perf_counter() - self._start, self._sent - self._completed - self._failed, since)

    def _over(self) -> bool:
        """Return whether nothing more should be sent."""
        seconds = self._options.seconds
        if self._stopped is None and seconds is not None and time.perf_counter() - self._start > seconds:
            self._stopped = f"the time limit of {seconds:g} s was reached"
        if self._stopped is None and self._watch is not None and self._watch.is_saturated():
            self._stopped = OVER_SATURATED
        return self._stopped is not None

    async def _open_connections(self) -> None:
        """Open connections for requests due at the start, so that a burst is one of requests and not of handshakes.
        Later requests open one when none is idle: some servers have one thread per connection, and an idle connection
        would occupy a thread that a request needs."""
        at_once = sum(not chain.at for chain in self._share)
        arrivals = self._options.arrivals
        for _ in range(min(at_once, arrivals.max_concurrency or arrivals.static_batch_size or 64, 512)):
            connection = Connection(self._host, self._port, self._tls)
            try:
                await connection.open()
            except OSError:
                return  # the request itself will report the error
            self._idle.insert(0, connection)  # `pop` then uses them in the order in which the server accepted them

    async def _tick(self) -> None:
        reported_at, due = 0.0, time.perf_counter()
        while True:
            due += TICK_SECONDS
            await sleep_until(due)
            now = time.perf_counter()
            self._delays.append(now - due)
            due = max(due, now - TICK_SECONDS)  # count a long pause only once
            if now - reported_at >= PROGRESS_SECONDS:
                reported_at = now
                self._report_progress(self._live())

    def _live(self) -> Live:
        return Live(max(0.0, time.perf_counter() - self._start), self._total, self._sent, self._completed, self._failed,
                    self._tokens, self._firsts, self._first_seconds)


@contextlib.contextmanager
def _interrupted_by(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on Ctrl-C and raise KeyboardInterrupt once everything has stopped. Raised at once, it could arise in
    a callback of a parser or the event loop, which would take it for an error of one connection, and `Runner.run` loses
    one that arrives together with the last answer. A second Ctrl-C is raised at once."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        stop()

    signal.signal(signal.SIGINT, press)
    try:
        yield
    except BaseException:
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _quiet_memory() -> Iterator[None]:
    """Collect garbage before a run and not during it, where it would delay every stream at once."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
