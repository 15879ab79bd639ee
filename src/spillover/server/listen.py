"""The listening socket, opened before anything slow happens. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from spillover.errors import SpilloverError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise SpilloverError that says what to type if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise SpilloverError(f"'{host}' is not an address of this machine ({error}); try --host 127.0.0.1") from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # at once: of two sockets that are only bound, neither detects the other
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise SpilloverError(_refusal(host, port, error)) from None
    return listening


def address_of(listening: socket.socket, host: str, tls: bool = False) -> str:
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        return (f"port {port} is in use{f' by {holder}' if holder else ''}; stop that, or choose another, as in "
                f"--port {port + 1 if port < 65535 else 8000}")
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one from 1024 on, as in --port 8000"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"'{host}' is not an address of this machine; try --host 127.0.0.1"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _holder(port: int) -> str | None:
    """Return the process that listens on the port, if this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return None
