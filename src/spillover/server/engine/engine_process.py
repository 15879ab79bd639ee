"""The engine process: `python -m spillover.server.engine.engine_process`, which the front starts and ends.

This module only ties the two processes together, before anything heavy is imported. A front that dies, even by SIGKILL,
closes the engine's standard input; where possible the kernel notifies the engine too. The engine ignores signals that a
terminal or service manager sends to every process: the front lets requests finish before it stops the engine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading

import zmq

from spillover.server.engine.heartbeat import Pulse

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
FLUSH_MS = 2000  # milliseconds for the last message to be sent


def main() -> int:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return 1
    launch = json.loads(line)
    _end_with(launch["parent"])
    pulse = Pulse(launch["pulse"])
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.sndhwm = socket.rcvhwm = 0  # unlimited: the front limits the number of requests
    socket.connect(launch["endpoint"])
    socket.send(STARTING)
    try:
        from spillover.server.engine.engine_service import serve

        return serve(socket, line, pulse)
    finally:
        socket.close(linger=FLUSH_MS)
        context.term()


# An encoded Progress message, sent before msgspec and torch are imported.
STARTING = b"\x94\xa8progress\xbbStarting the engine process\x00\x00"


def _end_with(parent: int) -> None:
    """Make this process end when the front does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl was called
        os._exit(1)

    def wait_for_end_of_input() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end_of_input, name="spillover-lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
