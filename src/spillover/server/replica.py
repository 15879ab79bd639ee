"""A server as one of several replicas: `python -m spillover.server.replica`, which a router's process starts and ends.

The first line of its standard input says what to serve; the end of its input means that the router has gone. It reports
its state in lines on its standard output. It inherits its listening socket, so no other process can take the port.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.plan.planner import Plan
from spillover.server.serve import serve
from spillover.server.settings import ServerSettings
from spillover.server.telemetry.logs import set_up_logging

PROGRESS_SECONDS = 0.2  # seconds between two lines of progress
LEAVE_SECONDS = 30.0  # seconds for an orderly shutdown once the router has gone; then the process exits at once


class ReplicaLaunch(msgspec.Struct):
    """The first line on standard input, as base64 of msgpack."""

    config: EngineConfig
    settings: ServerSettings
    listening: int  # file descriptor of the socket

    def line(self) -> bytes:
        return base64.b64encode(msgspec.msgpack.encode(self)) + b"\n"


class News(msgspec.Struct, omit_defaults=True):
    """One line on standard output, also base64 of msgpack. Exactly one of its fields is set."""

    plan: Plan | None = None
    progress: tuple[str, int, int] | None = None  # stage, amount done, total amount
    ready: bool = False
    failed: str | None = None  # error message for the user


def read_news(line: bytes) -> News:
    return msgspec.msgpack.decode(base64.b64decode(line), type=News)


def main() -> int:
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # anything printed goes to standard error, which is the log
    launch = msgspec.msgpack.decode(base64.b64decode(sys.stdin.buffer.readline()), type=ReplicaLaunch)
    end_with_parent()
    set_up_logging(launch.settings.log_format)

    def report(news: News) -> None:
        channel.write(base64.b64encode(msgspec.msgpack.encode(news)) + b"\n")

    try:
        with socket.socket(fileno=launch.listening) as listening:
            serve(launch.config, launch.settings, listening, on_plan=lambda plan: report(News(plan=plan)),
                  on_progress=_throttled(lambda *progress: report(News(progress=progress))),
                  on_ready=lambda _: report(News(ready=True)))
    except SpilloverError as error:
        report(News(failed=str(error)))
        return 2
    except BrokenPipeError:  # the router has gone
        return 1
    return 0


def _throttled(report: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    last = ("", 0.0)

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if stage != last[0] or now - last[1] >= PROGRESS_SECONDS:
            last = stage, now
            report(stage, done, total)

    return show


def end_with_parent() -> None:
    """Stop this process, by SIGTERM first, when its standard input ends, which means that its parent has gone."""
    threading.Thread(target=_end_with_input, name="spillover-lifeline", daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
