"""A context manager that starts a `spill serve` on a free port, waits until it is healthy, and always stops it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from spillover.bench.serving.server_facts import exchange
from spillover.lab.engines.spillover import spill

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a free port outside the range of ephemeral ports, so that a server can be restarted on it."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


class ServerProcess:
    """A server in a separate process group, with its output in a file."""

    def __init__(self, *arguments: str, ready_seconds: float = 120, environment: dict[str, str] | None = None,
                 command: str = "serve", program: Sequence[str] = ()) -> None:
        """`command`: serve or router, of `spill`. `program`: a different server that accepts --host and --port, to be
        started instead."""
        self._program = list(program) or [*spill(sys.executable), command]
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._arguments = arguments
        self._environment = environment or {}
        self._ready_seconds = ready_seconds
        self._log = Path(tempfile.mkstemp(prefix="spill-serve-", suffix=".log")[1])
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the server without waiting for it; `close` must be called later."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*self._program, *self._arguments, "--host", HOST, "--port",
                                              str(self.port)], stdout=log, stderr=subprocess.STDOUT,
                                             stdin=subprocess.DEVNULL, start_new_session=True,
                                             env=os.environ | self._environment)

    def __enter__(self) -> ServerProcess:
        self.launch()
        try:
            self.wait_until_healthy(self._ready_seconds)
        except BaseException:
            self.close()
            raise
        return self

    def wait_until_ready(self) -> float:
        """Wait until a launched server is healthy; return the seconds it took."""
        return self.wait_until_healthy(self._ready_seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def children(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def engine(self) -> psutil.Process:
        """Return the child process that computes: the largest, as the standard library may have started others."""
        return max(self.children(), key=resident_nbytes)

    def status(self, path: str = "/health", timeout: float = 5) -> int:
        """Return the HTTP status of a GET; 0 if there is no answer."""
        return exchange(self.url + path, seconds=timeout)[0]

    def wait_until_healthy(self, seconds: float) -> float:
        """Wait until the server is healthy; return the seconds it took."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with status {self.process.returncode}:\n{self.log}")
            if self.status() == 200:
                return time.monotonic() - start
            time.sleep(0.05)
        raise TimeoutError(f"the server was not healthy after {seconds:.0f} s:\n{self.log}")

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal to the server and wait for it; return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def close(self) -> None:
        """Stop the server, by force if it takes too long, and kill what is left of its process group."""
        if self._process is not None:
            if self._process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.stop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.unlink(missing_ok=True)


def resident_nbytes(process: Any) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
