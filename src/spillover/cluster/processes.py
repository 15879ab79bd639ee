"""The servers of one machine that a router owns: started, watched, started again when they die, ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from spillover.cluster.upstream import Upstream
from spillover.cluster.watch import Watcher
from spillover.errors import SpilloverError
from spillover.server.listen import listen
from spillover.server.replica import News, read_news

if TYPE_CHECKING:
    from spillover.plan.planner import Plan

log = logging.getLogger("spillover.router")

HOST = "127.0.0.1"
START_SECONDS = 900.0  # without a line of news, then a start has failed
STOP_SECONDS = 20.0  # for a server that was told to stop; then it is killed
QUICK_DEATH_SECONDS = 60.0  # a server that lived for less counts against MAX_QUICK_DEATHS
MAX_QUICK_DEATHS = 5  # in a row, then it is not started again
FIRST_BACKOFF_SECONDS = 0.5  # before the second start in a row; doubled for each one after, up to ...
LONGEST_BACKOFF_SECONDS = 30.0
LINE_BYTES = 1 << 24

Launch = Callable[[int, int], bytes]  # replica, file descriptor of its socket -> its first line of input
Progress = Callable[[int, str, int, int], None]  # replica, stage, done, in all


class ReplicaProcesses:
    def __init__(self, count: int, key: str, launch: Launch, environments: Sequence[Mapping[str, str]], *,
                 on_plan: Callable[[Plan], None], on_progress: Progress) -> None:
        """Own `count` servers that ask for `key`; `environments`: what each gets beside this process's."""
        self._key = key
        self._launch = launch
        self._environments = environments
        self._on_plan = on_plan
        self._on_progress = on_progress
        self._replicas = [_Process(place) for place in range(count)]
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self, watchers: Sequence[Watcher]) -> None:
        """Start the first, which may compile and fetch what all need, then the others at once."""
        first, *others = self._replicas
        await self._start(first, watchers[0], first=True)
        await asyncio.gather(*(self._start(each, watchers[each.place]) for each in others))
        self._keepers = [asyncio.create_task(self._keep(each, watchers[each.place])) for each in self._replicas]

    async def stop(self) -> None:
        """End all; afterwards nothing of them is left."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self._replicas))

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._replicas if each.process is not None]

    async def _start(self, replica: _Process, watcher: Watcher, first: bool = False) -> None:
        """Spawn one and wait until it serves; SpilloverError with its own sentence if it cannot."""
        port = await replica.spawn(self._launch, self._environments[replica.place])
        async for news in replica.news():
            if news.plan is not None and first:
                self._on_plan(news.plan)
            elif news.progress is not None:
                self._on_progress(replica.place, *news.progress)
            elif news.failed is not None:
                raise SpilloverError(f"replica {replica.place} cannot start: {news.failed}")
            elif news.ready:
                watcher.move(Upstream(f"http://{HOST}:{port}", self._key))
                return
        await replica.stop()
        raise SpilloverError(f"replica {replica.place} ended while starting; its log above says why")

    async def _keep(self, replica: _Process, watcher: Watcher) -> None:
        """Start a server again whenever it has died."""
        quick_deaths = 0
        while True:
            assert replica.process is not None
            code = await replica.process.wait()
            watcher.gone(f"its process ended ({_shown(code)})")
            while True:
                quick_deaths = quick_deaths + 1 if time.monotonic() - replica.started < QUICK_DEATH_SECONDS else 0
                if quick_deaths > MAX_QUICK_DEATHS:
                    log.error("replica-%d has died %d times in a row and is not started again", replica.place,
                              quick_deaths)
                    return
                if quick_deaths > 1:
                    await asyncio.sleep(min(FIRST_BACKOFF_SECONDS * 2 ** (quick_deaths - 2), LONGEST_BACKOFF_SECONDS))
                log.warning("replica-%d is started again", replica.place)
                try:
                    await replica.stop()
                    await self._start(replica, watcher)
                    break
                except SpilloverError as error:
                    log.error("%s", error)


class _Process:
    def __init__(self, place: int) -> None:
        self.place = place
        self.process: asyncio.subprocess.Process | None = None
        self.started = 0.0  # when it was spawned

    async def spawn(self, launch: Launch, environment: Mapping[str, str]) -> int:
        """Start a process; returns its port, which belongs to it alone."""
        with listen(HOST, 0) as listening:
            port: int = listening.getsockname()[1]
            self.started = time.monotonic()
            own = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}  # the router's to use
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "spillover.server.replica", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=(listening.fileno(),), env={**own, **environment}, limit=LINE_BYTES,
                start_new_session=True)  # a terminal's Ctrl-C is the router's to act on
            assert self.process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it died at once; its news end
                self.process.stdin.write(launch(self.place, listening.fileno()))
                await self.process.stdin.drain()
        return port

    async def news(self) -> AsyncIterator[News]:
        """Yield what it says until it ends."""
        assert self.process is not None
        assert self.process.stdout is not None
        while True:
            try:
                async with asyncio.timeout(START_SECONDS):
                    line = await self.process.stdout.readline()
            except TimeoutError:
                raise SpilloverError(f"replica {self.place} gave no sign of life for {START_SECONDS:.0f} s while "
                                     "starting") from None
            if not line:
                return
            yield read_news(line)

    async def stop(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def _shown(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
