"""The router process from start to end: HTTP from the first moment, a watcher per replica, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Callable, Sequence

from spillover.cluster.app import RouterApp, make_app
from spillover.cluster.fleet import Fleet
from spillover.cluster.metrics import RouterMetrics
from spillover.cluster.owned.replicas import OwnedReplicas
from spillover.cluster.owned.scaling import Scaling
from spillover.cluster.policy import POLICIES
from spillover.cluster.proxy import Proxy
from spillover.cluster.settings import RouterSettings
from spillover.cluster.upstream import Upstream
from spillover.cluster.watch import Spaces, Watcher, clock
from spillover.server.connection import Connections
from spillover.server.notify import notify
from spillover.server.serve import LAST_BYTES_SECONDS, HttpServer, StopSignal, run_loop

log = logging.getLogger("spillover.router")


class Router:
    """All parts of one router; `run` serves until it is stopped."""

    def __init__(self, settings: RouterSettings, upstreams: Sequence[tuple[str, Upstream]],
                 replicas: OwnedReplicas | None = None) -> None:
        """Route to these servers, given by name and address. `replicas` starts and stops them if the router owns them;
        None if it does not."""
        self.settings = settings
        self.fleet = Fleet(POLICIES[settings.policy]())
        self.scaling = None if replicas is None or settings.scale is None else Scaling(
            self.fleet, replicas, settings.scale, settings.drain_seconds)
        self.metrics = RouterMetrics(self.fleet, clock, self.scaling)
        self.spaces = Spaces(settings.watch)
        self.watchers: list[Watcher] = []
        self.proxy = Proxy(self.fleet, self.watchers, self.spaces, settings, self.metrics)
        for name, upstream in upstreams:
            replica = self.fleet.add(name)
            replica.prefill_role = name in settings.prefill
            self.watchers.append(Watcher(self.fleet, replica, upstream, self.spaces, settings.watch,
                                         self.proxy.changed))
        self.inner = RouterApp(self.fleet, self.watchers, self.proxy, self.metrics)
        self.app = make_app(self.inner, settings, self.metrics)
        self._replicas = replicas

    async def run(self, listening: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until a signal stops the router. Raise SpilloverError if one of its own replicas cannot start."""
        settings = self.settings
        connections = Connections(settings.max_connections, settings.client_timeout,
                                  lambda reason: self.metrics.refused.labels(reason).inc())
        server = HttpServer(self.app, connections, settings.ssl_certfile, settings.ssl_keyfile,
                            math.ceil(settings.drain_seconds) + LAST_BYTES_SECONDS)
        stop = StopSignal()
        http = asyncio.ensure_future(server.serve(sockets=[listening]))
        asked = asyncio.ensure_future(stop.asked.wait())
        starting = asyncio.ensure_future(self._start())
        watching: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait((http, asked, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                watching = [asyncio.create_task(watcher.run()) for watcher in self.watchers]
                if self.scaling is not None:
                    watching.append(asyncio.create_task(self.scaling.run()))
                gc.collect()
                gc.freeze()
                on_ready()
                notify("READY=1")
                await asyncio.wait((http, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
            await self._leave(server, http, stop)
            asked.cancel()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, starting, return_exceptions=True)
            if self._replicas is not None:
                await self._replicas.stop()
            for watcher in self.watchers:
                watcher.upstream.close()
            self.proxy.close()

    async def _start(self) -> None:
        if self._replicas is not None:
            await self._replicas.start(self.watchers)
        await asyncio.gather(*(watcher.check() for watcher in self.watchers))

    async def _leave(self, server: HttpServer, http: asyncio.Future[None], stop: StopSignal) -> None:
        """Accept requests until load balancers have noticed; then refuse new connections, and let requests finish. A
        second signal ends them at once."""
        self.inner.stopping = True
        notify("STOPPING=1")
        hurried = asyncio.ensure_future(stop.hurried.wait())
        if self.settings.shutdown_delay_seconds and not http.done():
            await asyncio.wait((http, hurried), timeout=self.settings.shutdown_delay_seconds,
                               return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if self.proxy.in_flight:
            log.info("Stopping after %d requests have finished, in %.0f s at most; Ctrl-C again stops at once",
                     self.proxy.in_flight, self.settings.drain_seconds)
        await asyncio.wait((http, hurried), return_when=asyncio.FIRST_COMPLETED,
                           timeout=self.settings.drain_seconds)
        hurried.cancel()
        if not http.done():
            server.force_exit = True
            for watcher in self.watchers:
                watcher.upstream.close()
        await asyncio.wait((http,), timeout=LAST_BYTES_SECONDS)


def serve_router(settings: RouterSettings, upstreams: Sequence[tuple[str, Upstream]], listening: socket.socket, *,
                 on_ready: Callable[[], None], replicas: OwnedReplicas | None = None) -> None:
    """Serve until a signal stops the router. Raise SpilloverError if the replicas cannot start."""
    run_loop(_main(settings, upstreams, listening, on_ready, replicas))


async def _main(settings: RouterSettings, upstreams: Sequence[tuple[str, Upstream]], listening: socket.socket,
                on_ready: Callable[[], None], replicas: OwnedReplicas | None) -> None:
    await Router(settings, upstreams, replicas).run(listening, on_ready)
