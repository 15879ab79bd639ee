"""An engine's side of a shared pool: connections that never wait past a deadline, and the memory mapped through them.

A connection is used by one thread at a time, which also does the copies for its leases and pins. So no copy can run
after the connection was closed, by which the owner learns that the slots may be reused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from spillover.kernels.huge_pages import map_file
from spillover.memory.shared_pool import wire
from spillover.memory.transfer.host_pool import HostPool

T = TypeVar("T")


class PoolUnavailableError(Exception):
    """The owner is not running, does not answer in time, or refuses the request."""


class PoolMemory:
    """The memory of one owner, mapped once by all connections to it; unmapped with the last of them."""

    def __init__(self, fd: int, size: int, slab_bytes: int, host: HostPool | None) -> None:
        """Map the memory. `host`: the host pool whose copies read and write it, a slab at a time."""
        if not 0 < slab_bytes <= size:
            raise PoolUnavailableError(f"the owner names slabs of {slab_bytes} bytes")
        self.size = size
        self.slab_bytes = slab_bytes
        self.users = 0  # number of connections that use the memory
        self._map = map_file(fd, size)
        self._view = memoryview(self._map)
        self._host = host
        if host is not None:
            host.adopt(self._view, slab_bytes)

    def view(self, place: int, nbytes: int) -> memoryview:
        if not 0 <= place <= self.size - nbytes:
            raise PoolUnavailableError(f"the owner names a place outside of the pool: {place}")
        return self._view[place : place + nbytes]

    def unmap(self) -> None:
        """Unmap the memory now: otherwise a stored traceback could keep it mapped for long."""
        if self._host is not None:
            self._host.disown(self._view)
        self._view.release()
        with contextlib.suppress(BufferError):  # a view still exists: the memory is unmapped with it
            self._map.close()


class Connection:
    """A connection to the owner; any failure closes it."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.memory: PoolMemory | None = None
        self._received = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(seconds)
            self._socket.connect(str(path))
            pid, uid = wire.peer(self._socket)
        except OSError as error:
            self.close()
            raise PoolUnavailableError(_reason(error)) from None
        if uid != os.getuid():
            self.close()
            raise PoolUnavailableError(f"it is served by another user, in process {pid}")

    @property
    def open(self) -> bool:
        return self._socket.fileno() >= 0

    def ask(self, request: wire.Request, answer: type[T], deadline: float) -> T:
        """Send a request and return its answer; PoolUnavailableError if there is none in time."""
        return self._exchange(request, answer, deadline)[0]

    def hello(self, request: wire.Hello, deadline: float) -> tuple[wire.Welcome, int]:
        """Return the owner's welcome, and the memory as a file descriptor that the caller must close."""
        welcome, descriptors = self._exchange(request, wire.Welcome, deadline, descriptors=1)
        if len(descriptors) != 1:
            self.close()
            raise PoolUnavailableError("the owner sent no memory")
        return welcome, descriptors[0]

    def keep(self, request: wire.Keep, deadline: float) -> tuple[wire.Kept, int | None]:
        """Return the owner's answer, and the run's memory, if any, as a file descriptor that the caller must
        close."""
        kept, descriptors = self._exchange(request, wire.Kept, deadline, descriptors=1)
        if len(descriptors) != (kept.state in (wire.NEW, wire.READY)):
            self._give_up(descriptors)
            raise PoolUnavailableError("the owner sent no memory")
        return kept, descriptors[0] if descriptors else None

    def close(self) -> None:
        self._socket.close()

    def _exchange(self, request: wire.Request, answer: type[T], deadline: float,
                  descriptors: int = 0) -> tuple[T, list[int]]:
        taken: list[int] = []
        try:
            self._set_timeout(deadline)
            self._socket.sendall(wire.encode(request))
            reply = wire.decode_reply(self._receive(deadline, taken if descriptors else None))
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            self._give_up(taken)
            raise PoolUnavailableError(_reason(error)) from None
        if not isinstance(reply, answer):
            self._give_up(taken)
            raise PoolUnavailableError(reply.reason if isinstance(reply, wire.Refused) else "an unexpected answer")
        return reply, taken

    def _give_up(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self.close()

    def _set_timeout(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _receive(self, deadline: float, descriptors: list[int] | None) -> bytes:
        """Return one message; append the file descriptors received with it to `descriptors`."""
        head = wire.LENGTH.size
        wanted = head
        while True:
            if len(self._received) >= head:
                (length,) = wire.LENGTH.unpack_from(self._received)
                if length > wire.MOST_BYTES:
                    raise ValueError(f"an answer of {length:,} bytes")
                wanted = head + length
            if len(self._received) >= wanted:
                body = bytes(self._received[head:wanted])
                del self._received[:wanted]
                return body
            self._set_timeout(deadline)
            if descriptors is None:
                data = self._socket.recv(1 << 18)
            else:
                data, found, _, _ = socket.recv_fds(self._socket, 1 << 12, 1)
                descriptors += found
            if not data:
                raise EOFError
            self._received += data


class Connections:
    """The connections of one engine, each used by one thread at a time."""

    def __init__(self, path: Path, identity: bytes, payload_bytes: int, description: Mapping[str, str],
                 host: HostPool | None = None) -> None:
        """Connect when connections are needed. `host`: the host pool whose copies use the owner's memory."""
        self._path = path
        self._host = host
        self._hello = wire.Hello(wire.VERSION, identity, payload_bytes, dict(description), uuid.uuid4().hex)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._memories: dict[bytes, PoolMemory] = {}  # generation -> mapped memory
        self._closed = False

    @contextlib.contextmanager
    def use(self, deadline: float) -> Iterator[tuple[Connection, PoolMemory]]:
        """Provide a connection and its memory; the connection is closed if the context raises."""
        with self._lock:
            if self._closed:
                raise PoolUnavailableError("the engine is closing")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect(deadline)
        assert connection.memory is not None
        try:
            yield connection, connection.memory
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                keep = connection.open and not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                self._release_connection(connection)

    def drop_idle(self) -> None:
        """Close idle connections, which unmaps the memory of an owner that has ended."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._release_connection(connection)

    def close(self) -> None:
        """Close all connections; one in use is closed when its thread has finished with it."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(self._path, max(0.001, deadline - time.monotonic()))
        try:
            welcome, descriptor = connection.hello(self._hello, deadline)
            try:
                with self._lock:
                    memory = self._memories.get(welcome.generation)
                    if memory is None:
                        memory = self._memories[welcome.generation] = PoolMemory(
                            descriptor, welcome.size, welcome.slab_bytes, self._host)
                    memory.users += 1
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            connection.close()
            raise PoolUnavailableError(_reason(error)) from None
        connection.memory = memory
        return connection

    def _release_connection(self, connection: Connection) -> None:
        """Close a connection, and unmap its memory with the last connection to it."""
        connection.close()
        memory, connection.memory = connection.memory, None
        with self._lock:
            if memory is not None:
                memory.users -= 1
                if memory.users == 0:
                    self._memories = {name: other for name, other in self._memories.items() if other is not memory}
                    memory.unmap()


def ask_owner(path: Path, request: wire.Request, answer: type[T], seconds: float = 5.0) -> T:
    """Send one request to the owner and return the answer; PoolUnavailableError if there is none."""
    connection = Connection(path, seconds)
    try:
        return connection.ask(request, answer, time.monotonic() + seconds)
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    match error:
        case TimeoutError() | BlockingIOError():
            return "no answer within the deadline"
        case FileNotFoundError() | ConnectionRefusedError():
            return "no process serves it"
        case EOFError() | ConnectionError():
            return "the owner closed the connection"
    return str(error) or type(error).__name__
