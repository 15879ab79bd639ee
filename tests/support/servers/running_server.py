"""A real `spill serve` in its own process, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

START_SECONDS = 240.0  # loading the default model alone takes 40 s on a slow machine; several servers start at once
SPILL = [sys.executable, "-c", "from spillover.cli.main import main; main()"]


@dataclass
class Server:
    """A running server and the file with its output."""

    process: subprocess.Popen[bytes]
    url: str
    output: Path
    key: str | None = None

    def http(self, **options: object) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)  # type: ignore[arg-type]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics, by name with labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
                for line in text.splitlines() if line and not line.startswith("#")}

    def metrics_total(self, name: str) -> float:
        """Return a metric, named without prefix, summed over its labels."""
        return sum(value for key, value in self.metrics().items() if key.startswith(f"spillover:{name}{{"))

    def log(self) -> str:
        return self.output.read_text()


@contextlib.contextmanager
def running(*arguments: str, key: str | None = None) -> Iterator[Server]:
    """Run `spill serve ARGUMENTS` on a free port; yield it when healthy and stop it with SIGTERM at the end."""
    with tempfile.NamedTemporaryFile(suffix=".log") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen([*SPILL, "serve", "--port", "0", *arguments], stdout=output, stderr=output,
                                   env=environment)
        server = Server(process, "", Path(output.name), key)
        try:
            server.url = _address(server)
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert code == 0, server.log()


def _address(server: Server) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for line in server.log().splitlines():
            if " is served at " in line:
                return line.split(" is served at ")[1].split("/v1")[0]
        assert server.process.poll() is None, server.log()
        time.sleep(0.05)
    raise AssertionError(f"not up within {START_SECONDS} s:\n{server.log()}")


def until(holds: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.02)
