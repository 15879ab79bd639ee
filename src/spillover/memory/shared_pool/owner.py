"""The process that owns a shared pool: one thread that keeps the index for all connected clients.

The memory is an anonymous file that clients map: it is freed when the owner and all clients have ended, in any order
and even if they are killed. Slots that a client was reading or writing are released when its connection closes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import selectors
import socket
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import POPULATE_WRITE, make_file, map_file
from spillover.memory.shared_pool import wire
from spillover.memory.shared_pool.index import Client, Model, PoolIndex
from spillover.memory.shared_pool.runs import PoolRuns
from spillover.units import format_bytes

log = logging.getLogger("spillover.memory")

BACKLOG = 64
READ_BYTES = 256 << 10


class PoolOwner:
    def __init__(self, capacity: int, path: Path) -> None:
        """Listen at the socket's path and create the memory; SpilloverError if that fails."""
        self.path = path
        self.generation = os.urandom(16)
        self._started = time.monotonic()
        self._connections: set[_Connection] = set()
        self._stopping = False
        with contextlib.ExitStack() as stack:
            self._lock = stack.enter_context(_locked(path))
            self.index = PoolIndex(capacity, prepare=self._prepare)
            self._memory = stack.enter_context(_Memory(self.index.capacity))
            # The process that writes a run populates its pages.
            self.runs = PoolRuns(self.index, partial(make_file, "spillover-weights"))
            stack.callback(self.runs.close)
            self.index.reclaim = lambda: self.runs.free_slabs(1)
            self._listening = stack.enter_context(_listen(path))
            self._waking, self._woken = (stack.enter_context(end) for end in socket.socketpair())
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._resources = stack.pop_all()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until stop()."""
        while not self._stopping:
            for key, events in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._serve(key.data, events)

    def stop(self) -> None:
        """Make run() return; may be called by another thread or a signal handler."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waking.send(b"\0")

    def close(self) -> None:
        """Close all connections, the memory and the socket."""
        for connection in list(self._connections):
            self._drop(connection)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._resources.close()

    def __enter__(self) -> PoolOwner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Connections

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the socket stays readable until a descriptor is free
                time.sleep(0.01)
            return
        pid, uid = wire.peer(accepted)
        if uid != os.getuid():
            log.warning("shared pool: rejected process %d of another user, %d", pid, uid)
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                connection.receive()
            # Process no further requests of a client that does not read its answers.
            while not connection.sending and (request := connection.next()) is not None:
                connection.send(*self._answer(connection, request))
            if connection.sending:
                connection.flush()
        except (OSError, EOFError):
            self._drop(connection)
            return
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("shared pool: disconnected a client that sent an invalid message (%s)", error)
            self._drop(connection)
            return
        wanted = selectors.EVENT_WRITE if connection.sending else selectors.EVENT_READ
        self._selector.modify(connection.socket, wanted, connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.client is not None:
            self.index.leave(connection.client)
            connection.client = None
        self.runs.release(connection)

    # Messages

    def _answer(self, connection: _Connection, request: wire.Request) -> tuple[wire.Reply, int | None]:
        """Return the answer, and the file descriptor to send with it, if any."""
        if isinstance(request, wire.Hello):
            return self._welcome(connection, request)
        if isinstance(request, wire.Ask):
            return self.report(connection.client.model if connection.client is not None else None), None
        if isinstance(request, wire.Evict):
            return self._evict(connection.client, request), None
        if isinstance(request, wire.Keep):
            return self._keep(connection, request)
        if isinstance(request, wire.Written):
            return wire.Count(int(self.runs.written(connection, (request.digest, request.nbytes)))), None
        client = connection.client
        if client is None:
            raise ValueError("blocks before a greeting")
        return self._use(client, request), None

    def _welcome(self, connection: _Connection, hello: wire.Hello) -> tuple[wire.Reply, int | None]:
        if hello.version != wire.VERSION:
            return _other_version(hello.version), None
        if connection.client is not None:
            raise ValueError("a second greeting")
        try:
            connection.client = self.index.join(hello.identity, hello.payload_bytes, hello.description)
        except SpilloverError as error:
            return wire.Refused(str(error)), None
        connection.engine = hello.engine
        return wire.Welcome(self.generation, self._memory.size, self.index.slab_bytes), self._memory.fd

    def _keep(self, connection: _Connection, request: wire.Keep) -> tuple[wire.Reply, int | None]:
        if request.version != wire.VERSION:
            return _other_version(request.version), None
        if request.nbytes < 1:
            raise ValueError(f"a run of {request.nbytes} bytes")
        connection.engine = request.engine
        run = self.runs.acquire(connection, (request.digest, request.nbytes))
        if run is None:
            return wire.Kept(wire.FULL), None
        if connection not in run.users:
            return wire.Kept(wire.BUSY), None
        return wire.Kept(wire.READY if run.written else wire.NEW), run.fd

    def _use(self, client: Client, request: wire.Request) -> wire.Reply:
        index = self.index
        match request:
            case wire.Find(keys):
                return wire.Found(index.find(client, keys))
            case wire.Take(keys):
                return wire.Places(index.take(client, keys))
            case wire.Publish(places, checksums):
                return wire.Found(index.publish(client, places, checksums))
            case wire.Pin(keys):
                return wire.Pinned(index.pin(client, keys))
            case wire.Release(places, damaged):
                index.release(client, places)
                return wire.Count(index.drop(client, damaged))
            case wire.Clear():
                return wire.Count(index.clear(client.model))
        raise ValueError(f"no answer to {request}")

    def _evict(self, client: Client | None, request: wire.Evict) -> wire.Reply:
        chosen: list[Model | None] = [client.model if client is not None else None]
        if client is None and request.identity is not None:
            wanted = request.identity
            chosen = [model for model in self.index.models.values() if model.identity.hex().startswith(wanted)]
            if len(chosen) != 1:
                return wire.Refused(f"{len(chosen) or 'no'} models have an identity that begins with "
                                    f"{request.identity}; `spill cache ls` lists the models in it")
        return wire.Count(self.index.evict(max(0, request.count), chosen[0], request.older_than))

    def report(self, only: Model | None = None) -> wire.Report:
        """Return the contents and counters of the pool, for all models or for one."""
        engines: dict[Model, set[str]] = {}
        for connection in self._connections:
            if connection.client is not None:
                engines.setdefault(connection.client.model, set()).add(connection.engine)
        listed = [only] if only is not None else list(self.index.models.values())
        models = [wire.ModelReport(
            identity=model.identity.hex(), description=dict(model.description), payload_bytes=model.payload_bytes,
            blocks=len(model.blocks), bytes=len(model.blocks) * model.payload_bytes,
            engines=len(engines.get(model, ())), hits=model.hits, misses=model.misses, stores=model.stores,
            evictions=model.evictions, last_use=model.last_use) for model in listed]
        return wire.Report(pid=os.getpid(), capacity=self.index.capacity, used=self.index.used_bytes,
                           prepared=self.index.prepared_bytes, engines=len(set().union(*engines.values())),
                           uptime=time.monotonic() - self._started, models=models, weights=self.runs.nbytes,
                           weights_used=sum(run.name[1] for run in self.runs if run.users))

    def _prepare(self, slab: int) -> bool:
        done = self._memory.prepare(slab * self.index.slab_bytes, self.index.slab_bytes)
        if not done:
            log.warning("shared pool: the system has no more memory for it; it stays at %s",
                        format_bytes(self.index.prepared_bytes))
        return done


class _Connection:
    """A client's socket, with buffers for partial requests and for an answer that is not sent completely."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.client: Client | None = None
        self.engine = ""
        self.sending = b""
        self._received = bytearray()

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise EOFError
            self._received += data

    def next(self) -> wire.Request | None:
        """Return the next request; None if it has not arrived completely."""
        head = wire.LENGTH.size
        if len(self._received) < head:
            return None
        (length,) = wire.LENGTH.unpack_from(self._received)
        if length > wire.MOST_BYTES:
            raise ValueError(f"a message of {length:,} bytes")
        if len(self._received) < head + length:
            return None
        body = bytes(self._received[head : head + length])
        del self._received[: head + length]
        return wire.decode_request(body)

    def send(self, reply: wire.Reply, descriptor: int | None) -> None:
        self.sending = wire.encode(reply)
        if descriptor is not None:  # it is sent with the first byte
            socket.send_fds(self.socket, [self.sending[:1]], [descriptor])
            self.sending = self.sending[1:]
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.sending = self.sending[self.socket.send(self.sending) :]


class _Memory:
    """The file in memory that clients map."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = make_file("spillover-pool", size)
        self._map = map_file(self.fd, size)

    def prepare(self, start: int, length: int) -> bool:
        """Populate the pages now, huge ones if possible: if that failed at a later access, it would kill the process
        that touches the page."""
        with contextlib.suppress(OSError):
            self._map.madvise(POPULATE_WRITE, start, length)
            return True
        with contextlib.suppress(OSError):  # an older kernel
            os.posix_fallocate(self.fd, start, length)
            return True
        return False

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        os.close(self.fd)


def _other_version(version: int) -> wire.Refused:
    return wire.Refused(f"the pool's owner speaks version {wire.VERSION} and not {version}; start it again with the "
                        "same release")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Lock this path for listening; the lock is released when the process ends, even if it is killed."""
    _private_folder(path.parent)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            raise SpilloverError(f"a pool is served at {path} already{f', by process {holder}' if holder else ''}; "
                                 "stop that, or give another --socket") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield lock
    finally:
        os.close(lock)


def _private_folder(folder: Path) -> None:
    """Create the folder and check that only this user can access it: a client can read prompts and forge blocks."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise SpilloverError(f"{folder} cannot be used for the pool's socket: {error.strerror}; give another "
                             "--socket") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SpilloverError(f"{folder} cannot be used for the pool's socket, since others can reach it; type `chmod "
                             f"700 {folder}` or give a --socket in a folder of your own")


@contextlib.contextmanager
def _listen(path: Path) -> Iterator[socket.socket]:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SpilloverError(f"{path} is a file, and no socket; give another --socket")
        path.unlink()  # it was left by an owner that was killed, since this process holds the lock
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            listening.bind(str(path))
            path.chmod(0o600)
            listening.listen(BACKLOG)
        except OSError as error:
            raise SpilloverError(f"cannot listen at {path}: {error.strerror}; give another --socket") from None
        listening.setblocking(False)
        yield listening
