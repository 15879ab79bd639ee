"""The servers that a router owns: started, watched, restarted when they die, scaled, and stopped with the router.

Independent of what a server is, such as a child process or an actor on another machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from spillover.cluster.upstream import Upstream
from spillover.cluster.watch import Watcher
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.plan.planner import Plan
    from spillover.server.replica import News

log = logging.getLogger("spillover.router")

QUICK_DEATH_SECONDS = 60.0  # a server that lived shorter than this counts against MAX_QUICK_DEATHS
MAX_QUICK_DEATHS = 5  # quick deaths in a row after which it is not restarted
FIRST_BACKOFF_SECONDS = 0.5  # wait before the second restart in a row; doubled for each further one, up to ...
LONGEST_BACKOFF_SECONDS = 30.0
NOT_NEEDED = "it is not started, as the load does not need it"

Progress = Callable[[int, str, int, int], None]  # replica, stage, amount done, total amount


class OwnedServer(Protocol):
    """One server, which can be started more than once."""

    started: float  # time of the last call of `spawn`, by time.monotonic

    async def spawn(self) -> str:
        """Start the server and return its URL; raise SpilloverError if it cannot start."""
        ...

    def news(self) -> AsyncIterator[News]:
        """Yield the server's reports while it starts; the iterator ends when the server does."""
        ...

    async def ended(self) -> str:
        """Wait until the server has exited, and return the reason."""
        ...

    async def stop(self) -> None:
        """Stop the server if it runs; afterwards no part of it remains."""
        ...


class OwnedReplicas:
    def __init__(self, servers: Sequence[OwnedServer], key: str, *, count: int | None = None,
                 on_plan: Callable[[Plan], None], on_progress: Progress) -> None:
        """Own these servers, one per replica of the fleet, whose API key is `key`; `count` of them are started first,
        by default all."""
        self.starting: set[int] = set()  # replicas that were added and have not served yet
        self._servers = servers
        self._key = key
        self._count = len(servers) if count is None else count
        self._on_plan = on_plan
        self._on_progress = on_progress
        self._watchers: Sequence[Watcher] = ()
        self._keepers: dict[int, asyncio.Task[None]] = {}  # tasks of the replicas that must serve
        self._given_up: set[int] = set()  # replicas whose servers died too often

    @property
    def wanted(self) -> list[int]:
        """Return the indices of replicas whose servers
 run, start or are being restarted."""
        return sorted(self._keepers)

    async def start(self, watchers: Sequence[Watcher]) -> None:
        """Start the first server, which may compile and fetch for all, then the others concurrently; raise
        SpilloverError if one cannot start."""
        self._watchers = watchers
        for watcher in watchers[self._count:]:
            watcher.suspend(NOT_NEEDED)
        await self._start(0, first=True)
        await asyncio.gather(*(self._start(index) for index in range(1, self._count)))
        self._keepers = {index: asyncio.create_task(self._keep(index)) for index in range(self._count)}

    def add(self) -> int | None:
        """Begin to start one more server and return its index; None if none is left."""
        index = next((each for each in range(len(self._servers))
                      if each not in self._keepers and each not in self._given_up), None)
        if index is not None:
            self.starting.add(index)
            self._keepers[index] = asyncio.create_task(self._add(index))
        return index

    async def remove(self, index: int) -> None:
        """Stop a replica's server; it can be added again later."""
        keeper = self._keepers.get(index)
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self._watchers[index].suspend(NOT_NEEDED)
        await self._servers[index].stop()
        self._keepers.pop(index, None)

    async def stop(self) -> None:
        """Stop all servers; afterwards no part of them remains."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def _start(self, index: int, first: bool = False) -> None:
        """Spawn a server and wait until it serves; raise SpilloverError with the reason if it cannot."""
        server = self._servers[index]
        try:
            url = await server.spawn()
            async for news in server.news():
                if news.plan is not None and first:
                    self._on_plan(news.plan)
                elif news.progress is not None:
                    self._on_progress(index, *news.progress)
                elif news.failed is not None:
                    raise SpilloverError(news.failed)
                elif news.ready:
                    self._watchers[index].set_upstream(Upstream(url, self._key))
                    return
        except SpilloverError as error:
            raise SpilloverError(f"replica {index} cannot start: {error}") from None
        await server.stop()
        raise SpilloverError(f"replica {index} exited while starting; see its log above")

    async def _add(self, index: int) -> None:
        try:
            await self._start(index)
        except SpilloverError as error:
            log.error("%s", error)
            await self._servers[index].stop()
            self._watchers[index].suspend(str(error))
            del self._keepers[index]
            return
        finally:
            self.starting.discard(index)
        await self._keep(index)

    async def _keep(self, index: int) -> None:
        """Restart a server whenever it has died."""
        server, watcher = self._servers[index], self._watchers[index]
        quick_deaths, serves = 0, True
        while True:
            if serves:
                watcher.mark_gone(f"its process exited ({await server.ended()})")
            quick_deaths = quick_deaths + 1 if time.monotonic() - server.started < QUICK_DEATH_SECONDS else 0
            if quick_deaths > MAX_QUICK_DEATHS:
                log.error("replica-%d has died %d times in a row and is not restarted", index, quick_deaths)
                self._given_up.add(index)
                del self._keepers[index]
                return
            if quick_deaths > 1:
                await asyncio.sleep(min(FIRST_BACKOFF_SECONDS * 2 ** (quick_deaths - 2), LONGEST_BACKOFF_SECONDS))
            log.warning("restarting replica-%d", index)
            try:
                await server.stop()
                await self._start(index)
                serves = True
            except SpilloverError as error:
                log.error("%s", error)
                serves = False
