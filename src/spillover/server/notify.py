"""Notifications to systemd of the service's state (`Type=notify`); no effect if NOTIFY_SOCKET is not set."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send "READY=1", "STOPPING=1" or "STATUS=..." to the socket in NOTIFY_SOCKET; never blocks, never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.send(state.encode())
