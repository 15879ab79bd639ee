"""The front process from start to end: HTTP from the first moment, the engine process, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.plan.planner import Plan
from spillover.server.app import make_app
from spillover.server.auth import KeyRing
from spillover.server.connection import Connections
from spillover.server.engine.async_llm import AsyncLLM
from spillover.server.notify import notify
from spillover.server.settings import ServerSettings

log = logging.getLogger("spillover.server")

# Interval in seconds after which a parsing thread yields the interpreter to the event loop.
_SWITCH_SECONDS = 0.001
_LAST_SPANS_SECONDS = 3  # seconds for the traces of the last requests to reach their collector
LAST_BYTES_SECONDS = 5  # seconds for completed responses to reach clients that read slowly


def serve(config: EngineConfig, settings: ServerSettings, listening: socket.socket, *,
          on_plan: Callable[[Plan], None], on_progress: Callable[[str, int, int], None],
          on_ready: Callable[[AsyncLLM], None]) -> None:
    """Serve until a signal stops the server. Raise SpilloverError if the engine cannot start."""
    run_loop(_serve(config, settings, listening, on_plan, on_progress, on_ready))


async def _serve(config: EngineConfig, settings: ServerSettings, listening: socket.socket,
                 on_plan: Callable[[Plan], None], on_progress: Callable[[str, int, int], None],
                 on_ready: Callable[[AsyncLLM], None]) -> None:
    client = AsyncLLM(**vars(config), max_queue=settings.max_queue, limits=settings.limits, on_plan=on_plan,
                      on_progress=on_progress)
    app = make_app(client, settings)
    connections = Connections(settings.max_connections, settings.client_timeout, app.state.recorder.count_refusal)
    server = HttpServer(app, connections, settings.ssl_certfile, settings.ssl_keyfile, LAST_BYTES_SECONDS)
    stop = StopSignal()
    if settings.api_key_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_keys, app.state.keys)
    http = asyncio.ensure_future(server.serve(sockets=[listening]))
    starting = asyncio.ensure_future(client.start())
    asked = asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait((http, starting, asked), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            gc.collect()
            gc.freeze()  # all loaded objects stay, and scanning them again would stall every request for 80 ms
            on_ready(client)
            notify("READY=1")
            await asyncio.wait((http, asked), return_when=asyncio.FIRST_COMPLETED)
        else:
            starting.cancel()
            await asyncio.wait((starting,))
    finally:
        app.state.front.draining = True  # first, so that clients of /readyz send requests elsewhere from now on
        notify("STOPPING=1")
        await _shut_down(client, server, http, stop, settings)
        asked.cancel()
        app.state.front.close()
        if app.state.traces is not None:
            app.state.traces.close(_LAST_SPANS_SECONDS)


async def _shut_down(client: AsyncLLM, server: HttpServer, http: asyncio.Future[None], stop: StopSignal,
                     settings: ServerSettings) -> None:
    """Shut down: accept requests until load balancers have noticed, finish running ones, stop engine and connections.

    Until the end, probes and /metrics are answered and requests refused: clients are sent elsewhere, not cut off.
    """
    hurried = asyncio.ensure_future(stop.hurried.wait())
    if client.ready and settings.shutdown_delay_seconds and not http.done():
        log.info("/readyz answers 503 from now on; requests are still accepted for %g s",
                 settings.shutdown_delay_seconds)
        await asyncio.wait((http, hurried), timeout=settings.shutdown_delay_seconds,
                           return_when=asyncio.FIRST_COMPLETED)
    if client.num_open:
        log.info("Stopping after %d running sequences have finished, in %.0f s at most; Ctrl-C again stops at once",
                 client.num_open, settings.drain_seconds)
    draining = asyncio.ensure_future(client.close(settings.drain_seconds))
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        server.force_exit = True
        await client.close(0)
    await asyncio.wait((draining,))
    hurried.cancel()
    server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await http


def _reload_keys(keys: KeyRing) -> None:
    try:
        log.info("Read --api-key-file again: %d API keys", keys.reload())
    except SpilloverError as error:
        log.error("%s; the keys stay as they were", error)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a server's coroutine to completion."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


class StopSignal:
    """A handler of SIGINT and SIGTERM: the first signal requests an orderly shutdown, the second hurries it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


class HttpServer(uvicorn.Server):
    """A server whose signals are handled by StopSignal, because uvicorn would cut the streams first."""

    def __init__(self, app: ASGIApp, connections: Connections, ssl_certfile: str | None, ssl_keyfile: str | None,
                 leave_seconds: int) -> None:
        super().__init__(uvicorn.Config(
            app, http=connections.protocol(), ws="none", lifespan="off", access_log=False, log_config=None,
            server_header=False, timeout_keep_alive=65, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile,
            timeout_graceful_shutdown=leave_seconds))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
