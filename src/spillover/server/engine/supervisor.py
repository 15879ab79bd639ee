"""One engine process as the front handles it: spawned, connected by a socket, watched, stopped and cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from spillover.engine.config import EngineConfig
from spillover.server.engine.heartbeat import Heartbeat
from spillover.server.engine.protocol import Failed, FromEngine, Launch, Stop
from spillover.server.engine.wire import decode_from_engine, encode

STOP_SECONDS = 15.0  # seconds for an engine to stop, as it may still write KV to disk; then it is killed
# The number of messages handled before other callbacks run on the event loop. A front slower than the engine then sends
# the tokens of a few steps in one chunk and so catches up; readers wait for no more than these messages.
MESSAGES_AT_ONCE = 4
FAILURE_SECONDS = 0.5  # seconds for a failing engine's last message to arrive after its exit
MAX_FOLDER = 80  # maximum length of the folder's path, as a socket's path has at most 107 bytes


class EngineProcess:
    """A process, used on the event loop that created it. `on_message` is called with all its messages except Failed."""

    def __init__(self, config: EngineConfig, on_message: Callable[[FromEngine], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._failed: Failed | None = None
        self._drains = False  # True while a call of _drain is scheduled
        # The exit code, or minus the signal's number. Several tasks wait for it: shield it, or use asyncio.wait.
        self.exited: asyncio.Future[int] = self._loop.create_future()
        # A folder that only this user can access; needed until the engine has connected.
        self._folder: Path | None = Path(tempfile.mkdtemp(prefix="spillover-", dir=_short_folder()))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self.heartbeat = Heartbeat()
        endpoint = f"ipc://{self._folder / 'engine'}"
        try:
            self._socket.bind(endpoint)
            # The engine shares its cores with the front: OpenMP threads that spin for long between two parallel regions
            # would delay the front, and the front them.
            environment = {"GOMP_SPINCOUNT": "10000", **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spillover.server.engine.engine_process"], stdin=subprocess.PIPE,
                env=environment, pass_fds=(self.heartbeat.write_end,))
        except BaseException:
            self.heartbeat.close()
            self._close_socket()
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain_soon)
        launch = msgspec.json.encode(Launch(endpoint, config, os.getpid(), self.heartbeat.write_end)) + b"\n"
        self.heartbeat.close_write_end()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process died at once; `exited` will report it
            self._process.stdin.write(launch)
            self._process.stdin.flush()
        threading.Thread(target=self._wait, name="spillover-engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send an encoded message; it is lost if the engine has exited, which `exited` reports."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)
        # Sending may consume the signal of an arrived message: the descriptor becomes readable only at a change.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain_soon()

    async def failure(self) -> Failed | None:
        """Return the error that an exited engine sent, if any; it may arrive a moment after the exit."""
        code = await asyncio.shield(self.exited)
        deadline = self._loop.time() + FAILURE_SECONDS
        while code > 0 and self._failed is None and self._loop.time() < deadline:
            self._drain()
            await asyncio.sleep(0.01)
        return self._failed

    def kill(self) -> None:
        self._process.kill()

    async def stop(self) -> None:
        """Request the process to stop, then kill it if it does not; afterwards no part of it remains."""
        if not self.exited.done():
            self.send(encode(Stop()))
            await asyncio.wait([self.exited], timeout=STOP_SECONDS)
        if not self.exited.done():
            self._process.kill()
            await asyncio.wait([self.exited])
        self.close()

    def close(self) -> None:
        """Free the resources of an engine that has exited; one that has not is killed."""
        if self._socket.closed:
            return
        if not self.exited.done():
            self._process.kill()
        self._loop.remove_reader(self._fd)
        self.heartbeat.close()
        self._close_socket()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _drain_soon(self) -> None:
        if not self._drains:
            self._drains = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Handle the messages that have arrived."""
        self._drains = False
        for _ in range(MESSAGES_AT_ONCE):
            if self._socket.closed:
                return
            try:
                message = decode_from_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._remove_folder()  # the engine is connected, and will not connect again
            if isinstance(message, Failed):
                self._failed = message
            else:
                self._on_message(message)
        self._drain_soon()

    def _wait(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed, so no task waits any more
            self._loop.call_soon_threadsafe(self._note_exit, code)

    def _note_exit(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)

    def _close_socket(self) -> None:
        self._socket.close()
        self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def exit_description(code: int) -> str:
    """Return how a process exited: 'exited with code 1', 'was killed by SIGKILL (...)'."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (by a person, or by the system because memory ran out)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _short_folder() -> str | None:
    return None if len(tempfile.gettempdir()) <= MAX_FOLDER else "/tmp"
