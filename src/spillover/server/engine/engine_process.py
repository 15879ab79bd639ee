"""The engine process: `python -m spillover.server.engine.engine_process`, started by the front and ended with it.

Only what ties the two processes together is here, and nothing heavy is imported before it holds. A front that dies,
even by SIGKILL, closes our standard input; the kernel tells us too where it can. Signals that a terminal or a service
manager sends to every process are the front's to act on: it lets requests end before it stops us.
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
FLUSH_MS = 2000  # for the last message to leave


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
    socket.sndhwm = socket.rcvhwm = 0  # bounded by the requests that the front lets in
    socket.connect(launch["endpoint"])
    socket.send(STARTING)
    try:
        from spillover.server.engine.engine_service import serve

        return serve(socket, line, pulse)
    finally:
        socket.close(linger=FLUSH_MS)
        context.term()


# A Progress message, said before msgspec and torch are imported.
STARTING = b"\x94\xa8progress\xbbStarting the engine process\x00\x00"


def _end_with(parent: int) -> None:
    """End this process with the front."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)

    def wait_for_end_of_input() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end_of_input, name="spillover-lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
