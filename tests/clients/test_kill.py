"""If the engine dies in mid-stream, or the server is stopped, clients learn it at once, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_process import HOST, ServerProcess

NOTICED = 2.0  # seconds within which every client must have its error
LONG = {"model": "default", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"model": "default", "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
END = object()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-model-len", "2048", environment={"OMP_NUM_THREADS": "1"}) as process:
        yield process


class Streaming:
    """A client that reads a stream in a thread, and records when each event arrived."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.status = 0
        self.events: list[str] = []
        self.ended: float | None = None
        self.failure: Exception | None = None
        self._arrivals: queue.Queue[object] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()

    def wait_for_events(self, count: int, seconds: float = 60) -> None:
        while len(self.events) < count:
            assert self._arrivals.get(timeout=seconds) is not END, f"the stream ended: {self.events} {self.failure}"

    def wait_for_end(self, seconds: float) -> float:
        self._thread.join(seconds)
        assert self.ended is not None, f"no end within {seconds} s"
        return self.ended

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
                self.status = reply.status_code
                for line in reply.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self._arrivals.put(line)
        except Exception as error:
            self.failure = error
        finally:
            self.ended = time.monotonic()
            self._arrivals.put(END)


def answer(server: ServerProcess) -> str:
    reply = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; a port in TIME_WAIT counts as free
        with contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return True
    return False


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Yield a folder with a short path for a server's files, including sockets, apart from those of other tests."""
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        yield folder


def shared_memory(server: ServerProcess) -> set[Path]:
    """Return the files in /dev/shm that the server's processes have mapped."""
    found = set()
    for pid in (server.pid, *(child.pid for child in server.children())):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, path = line.partition("/dev/shm/")
            if path and not path.endswith(" (deleted)"):
                found.add(Path("/dev/shm", path))
    return found


def test_the_engine_is_killed_in_mid_stream_and_the_server_serves_again(server: ServerProcess) -> None:
    before = answer(server)
    streams = [Streaming(server.url, LONG | {"stream": True}) for _ in range(3)]
    whole = Streaming(server.url, LONG)  # not streamed: one answer at the end
    for stream in streams:
        stream.wait_for_events(3)
    engine = server.engine()
    killed = time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)

    for stream in streams:
        assert stream.wait_for_end(NOTICED + 5) - killed < NOTICED
        assert stream.status == 200
        errors = [json.loads(event)["error"] for event in stream.events if event.startswith('{"error"')]
        assert len(errors) == 1, stream.events[-3:]
        assert errors[0]["message"]
    assert whole.wait_for_end(NOTICED + 5) - killed < NOTICED
    assert whole.status in (500, 503)
    assert json.loads("".join(whole.events))["error"]["message"]

    healthy_after = server.wait_until_healthy(60)
    assert server.engine().pid != engine.pid
    assert answer(server) == before
    print(f"served again {time.monotonic() - killed:.1f} s after the kill (health {healthy_after:.1f} s)")


def test_health_says_so_while_the_engine_is_away(server: ServerProcess) -> None:
    os.kill(server.engine().pid, signal.SIGKILL)
    seen = set()
    deadline = time.monotonic() + NOTICED
    while time.monotonic() < deadline and 503 not in seen:
        seen.add(server.status())
    assert 503 in seen
    server.wait_until_healthy(60)


@pytest.mark.parametrize(("number", "load_format", "max_tokens"), [
    (signal.SIGTERM, "auto", 100),
    (signal.SIGINT, "null", 1500),
])
def test_a_signal_drains_and_leaves_nothing(number: signal.Signals, load_format: str, max_tokens: int,
                                            short_folder: str) -> None:
    arguments = ("--max-model-len", "2048", "--load-format", load_format)
    created = os.stat(short_folder).st_mtime_ns
    with ServerProcess(*arguments, environment={"OMP_NUM_THREADS": "1", "TMPDIR": short_folder}) as server:
        assert os.stat(short_folder).st_mtime_ns > created, "its socket lies elsewhere: this test would see nothing"
        stream = Streaming(server.url, LONG | {"stream": True, "max_tokens": max_tokens})
        stream.wait_for_events(2)
        children, shared = server.children(), shared_memory(server)
        assert server.stop(number, seconds=40) in (0, 128 + number, -number)
        stream.wait_for_end(5)
        assert stream.events[-1] == "[DONE]", f"{stream.events[-2:]} {stream.failure}"
        _, alive = psutil.wait_procs(children, timeout=2)
        assert not alive
        assert port_is_free(server.port)
        assert "Traceback" not in server.log, server.log
        assert os.listdir(short_folder) == []
        assert not [path for path in shared if path.exists()]


def test_an_answer_that_outlasts_the_drain_is_cut_with_an_error() -> None:
    arguments = ("--max-model-len", "2048", "--drain-seconds", "1")
    with ServerProcess(*arguments, environment={"OMP_NUM_THREADS": "1"}) as server:
        stream = Streaming(server.url, LONG | {"stream": True})
        stream.wait_for_events(2)
        start = time.monotonic()
        server.stop(seconds=15)
        assert time.monotonic() - start < 8
        stream.wait_for_end(5)
        assert any(event.startswith('{"error"') for event in stream.events[-2:]), stream.events[-2:]
        assert port_is_free(server.port)


def test_a_front_that_is_killed_takes_the_engine_with_it() -> None:
    with ServerProcess("--load-format", "null") as server:
        children = server.children()
        assert children
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, "the engine outlives its front"
        assert port_is_free(server.port)
