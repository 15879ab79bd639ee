"""HTTP/1.1 to one replica: connections that are kept, bodies as they come, no faster than they are read.

An error before any byte of an answer is a NoAnswer, after which the request may be sent elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

from spillover.errors import SpilloverError

Headers = Sequence[tuple[bytes, bytes]]

MOST_IDLE = 256  # connections kept without a request
HELD_BYTES = 262_144  # of an answer that waits for its reader; then no more is read from the replica


class NoAnswer(ConnectionError):  # noqa: N818
    """Nothing was heard: the connection could not be made, or ended or stayed silent before a byte of the answer."""


class BrokenOff(ConnectionError):  # noqa: N818
    """An error in the middle of an answer."""


class Answer:
    """An answer whose head has come. `close` must follow, whether or not the body was read."""

    def __init__(self, wire: _Wire, pool: Upstream) -> None:
        self.status, self.headers = wire.status, wire.headers
        self._wire = wire
        self._pool = pool

    def header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self.headers if name == wanted), b"")

    @property
    def is_stream(self) -> bool:
        return self.header(b"content-type").startswith(b"text/event-stream")

    async def pieces(self, timeout: float) -> AsyncIterator[bytes]:
        """Yield the body as it comes; BrokenOff if it ends before its end, or nothing comes for `timeout` seconds."""
        while True:
            piece = await self._wire.piece(timeout)
            self._pool.heard(self._wire)
            if not piece:
                return
            yield piece

    def close(self) -> None:
        self._pool.give_back(self._wire)


class Upstream:
    """One replica's address and connections."""

    def __init__(self, url: str, key: str | None = None, connect_seconds: float = 2.0) -> None:
        """Speak to the server at `url`; `key`: sent as `Authorization: Bearer` where a request has none."""
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpilloverError(f"'{url}' is not the address of a server, such as http://10.0.0.7:8000")
        try:
            port = parts.port
        except ValueError:
            raise SpilloverError(f"'{url}' has no valid port; write something like http://10.0.0.7:8000") from None
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/").encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._key = key
        self._connect_seconds = connect_seconds
        self._idle: list[_Wire] = []
        self._unheard: set[_Wire] = set()  # with a request, and without a byte of its answer's body

    async def request(self, method: str, path: str, headers: Headers = (), body: bytes = b"", *,
                      timeout: float) -> Answer:
        """Send a request and return when the answer's head has come, within `timeout` seconds; NoAnswer otherwise."""
        message = self._message(method, path, headers, body)
        while True:
            wire, kept = await self._wire()
            self._unheard.add(wire)
            try:
                wire.send(message)
                async with asyncio.timeout(timeout):
                    await wire.headed
                return Answer(wire, self)
            except TimeoutError:
                self.heard(wire)
                wire.abort()
                raise NoAnswer(f"{self.url} did not answer within {timeout:g} s") from None
            except NoAnswer:
                self.heard(wire)
                if not kept or wire.heard or wire.given_up:  # else the server had just closed an idle connection
                    raise
            except BaseException:
                self.heard(wire)
                wire.abort()
                raise

    async def fetch(self, method: str, path: str, headers: Headers = (), body: bytes = b"", *,
                    timeout: float, limit: int = 1 << 23) -> tuple[Answer, bytes]:
        """Send a request and return the whole answer; NoAnswer if it does not come whole."""
        answer = await self.request(method, path, headers, body, timeout=timeout)
        try:
            whole = bytearray()
            async for piece in answer.pieces(timeout):
                whole += piece
                if len(whole) > limit:
                    raise NoAnswer(f"{self.url}{path} answered with more than {limit} bytes")
            return answer, bytes(whole)
        except BrokenOff as error:
            raise NoAnswer(str(error)) from None
        finally:
            answer.close()

    def abort_unheard(self) -> None:
        """End every request that has no answer yet, so that it is sent elsewhere."""
        for wire in list(self._unheard):
            wire.given_up = True
            wire.abort()

    def heard(self, wire: _Wire) -> None:
        """Note that an answer has begun, or will not."""
        self._unheard.discard(wire)

    def give_back(self, wire: _Wire) -> None:
        self.heard(wire)
        if wire.reusable and len(self._idle) < MOST_IDLE:
            self._idle.append(wire)
        else:
            wire.abort()

    def close(self) -> None:
        for wire in (*self._idle, *self._unheard):
            wire.abort()
        self._idle.clear()

    async def _wire(self) -> tuple[_Wire, bool]:
        while self._idle:
            wire = self._idle.pop()
            if not wire.lost:
                return wire, True
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, wire = await asyncio.get_running_loop().create_connection(_Wire, self._host, self._port,
                                                                             ssl=self._tls)
        except TimeoutError:
            raise NoAnswer(f"{self.url} did not accept a connection within {self._connect_seconds:g} s") from None
        except OSError as error:
            raise NoAnswer(f"{self.url} cannot be reached: {error.strerror or error}") from None
        return wire, False

    def _message(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        lines = [b"%s %s%s HTTP/1.1\r\nhost: %s" % (method.encode(), self._path, path.encode(), self._authority)]
        lines += [b"%s: %s" % pair for pair in headers]
        if self._key is not None and not any(name == b"authorization" for name, _ in headers):
            lines.append(b"authorization: Bearer " + self._key.encode())
        if body or method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body


class _Wire(asyncio.Protocol):
    """One connection; parses one answer at a time."""

    headed: asyncio.Future[None]

    def __init__(self) -> None:
        self.lost = False
        self.heard = False  # whether anything of this answer has come
        self.given_up = False  # its request is to be sent elsewhere
        self.complete = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._error: Exception | None = None
        self._more: asyncio.Future[None] | None = None
        self._keep = False
        self._until_end = False  # the body is framed by the end of the connection

    def send(self, message: bytes) -> None:
        self.heard = self.complete = self._keep = self._until_end = False
        self.status, self.headers, self._error, self._held = 0, [], None, 0
        self._pieces.clear()
        self.headed = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        if self.lost or self._transport is None:
            self._fail(NoAnswer("the connection was closed"))
            return
        self._transport.write(message)

    async def piece(self, timeout: float) -> bytes:
        """Return the next bytes of the body; none at its end."""
        while not self._pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            self._more = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._more
            except TimeoutError:
                self.abort()
                raise BrokenOff(f"nothing came for {timeout:g} s") from None
        piece = self._pieces.popleft()
        self._held -= len(piece)
        if self._held < HELD_BYTES and self._transport is not None and not self.lost:
            with contextlib.suppress(RuntimeError):
                self._transport.resume_reading()
        return piece

    @property
    def reusable(self) -> bool:
        return self.complete and self._keep and not self.lost

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self.complete:
            self.abort()  # it speaks without being asked
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail((BrokenOff if self.headed.done() else NoAnswer)(f"the answer is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.complete:
            return
        if self._until_end and error is None:
            self.on_message_complete()
        elif self.headed.done():
            self._fail(BrokenOff("the server closed the connection in the middle of an answer"))
        else:
            self._fail(NoAnswer("the server closed the connection without an answer"))

    # From the parser

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:  # 100 Continue: the answer follows
            return
        names = dict(self.headers)
        self._until_end = b"content-length" not in names and b"chunked" not in names.get(b"transfer-encoding", b"")
        if not self.headed.done():
            self.headed.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held += len(body)
        if self._held > HELD_BYTES and self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status < 200 and not self.lost:
            return
        self.complete = True
        self._keep = self._parser is not None and self._parser.should_keep_alive() and not self._until_end
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        if not self.headed.done():
            self.headed.set_exception(error)
            self.headed.exception()  # nobody may be waiting for it
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
