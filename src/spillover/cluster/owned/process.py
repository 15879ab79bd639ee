"""A server as a child process, which reports its state and ends with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping

from spillover.errors import SpilloverError
from spillover.server.listen import listen
from spillover.server.replica import News, read_news

HOST = "127.0.0.1"
START_SECONDS = 900.0  # time without a line of news after which a start has failed
STOP_SECONDS = 20.0  # time for a server to stop after SIGTERM; then it is killed
LINE_BYTES = 1 << 24

Launch = Callable[[int], bytes]  # file descriptor of the server's socket -> its first line of input


class ServerProcess:
    def __init__(self, launch: Launch, environment: Mapping[str, str], *, host: str = HOST,
                 address: str = HOST) -> None:
        """Own a server that listens at a free port of `host` and is reached at `address`; `environment` is added to
        this process's environment."""
        self.process: asyncio.subprocess.Process | None = None
        self.started = 0.0
        self._launch = launch
        self._environment = environment
        self._host = host
        self._address = address

    async def spawn(self) -> str:
        """Start a process and return its URL. No other process can take its port."""
        with listen(self._host, 0) as listening:
            port: int = listening.getsockname()[1]
            self.started = time.monotonic()
            own = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}  # only for the router
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "spillover.server.replica", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=(listening.fileno(),), env={**own, **self._environment}, limit=LINE_BYTES,
                start_new_session=True)  # the router handles a terminal's Ctrl-C
            assert self.process.stdin is not None
            with contextlib.suppress(ConnectionError):  # the process died at once, which ends its news
                self.process.stdin.write(self._launch(listening.fileno()))
                await self.process.stdin.drain()
        return f"http://{self._address}:{port}"

    async def line(self) -> bytes:
        """Return the next line that the server prints; empty once it has exited."""
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self.process.stdout.readline()
        except TimeoutError:
            raise SpilloverError(f"it reported no progress for {START_SECONDS:.0f} s while starting") from None

    async def news(self) -> AsyncIterator[News]:
        while line := await self.line():
            yield read_news(line)

    async def ended(self) -> str:
        assert self.process is not None
        code = await self.process.wait()
        return f"signal {-code}" if code < 0 else f"status {code}"

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
