"""A real Valkey (or Redis) server for tests: in a temporary folder, on a free port and its own socket.

A test folder imports the fixtures in its conftest.py: `from support.valkey import valkey, valkey_program`.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from spillover.cli.bench.redis_server import find_server


class Valkey:
    """A server started with these arguments. After a kill it can be restarted, empty, at the same address."""

    def __init__(self, program: str, *arguments: str, tls: tuple[Path, Path] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="valkey-"))  # short, because the path of a socket is limited
        self._program, self._arguments, self._tls = program, arguments, tls
        self.socket = self._folder / "socket"
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ports = ["--port", str(self.port)]
        if self._tls is not None:
            certificate, key = map(str, self._tls)
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-cert-file", certificate, "--tls-key-file", key,
                     "--tls-ca-cert-file", certificate, "--tls-auth-clients", "no"]
            self.url = f"rediss://127.0.0.1:{self.port}"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, *ports, "--bind", "127.0.0.1", "--unixsocket", str(self.socket), "--save", "",
                 "--appendonly", "no", "--dir", str(self._folder), *self._arguments],
                stdout=log, stderr=log,
            )
        self._wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """Stop the process: it accepts connections but does not answer until thaw()."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self, **options: str) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=10, retry=Retry(NoBackoff(), 0), **options)

    def __enter__(self) -> Valkey:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def _wait(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                self.client().ping()
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert self._process is not None
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < deadline, "the server did not start within 30 s"
                time.sleep(0.01)
            else:
                return


@pytest.fixture(scope="session")
def valkey_program() -> str:
    program = find_server()
    if program is None:
        pytest.skip(
            "no Valkey or Redis server: install the Debian package valkey-server (from Debian 13 on) or redis-server"
        )
    return program


@pytest.fixture
def valkey(valkey_program: str) -> Iterator[Valkey]:
    """Yield an empty server without password or TLS."""
    with Valkey(valkey_program) as server:
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
