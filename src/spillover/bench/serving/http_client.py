"""HTTP/1.1 over one socket, as little as load needs: keep-alive, any framing, and the time at which bytes came.

A general client library spends more time on a request than the server under test does. Bytes get their time where the
event loop hands them over, before anything is parsed, so that a client busy with one stream does not age another's.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

Sink = Callable[[float, bytes], None]  # gets the time and the bytes of each piece of a body


@dataclass(frozen=True)
class Call:
    """What is sent. `raw` replaces the whole message, for what no library would send."""

    method: str
    path: str
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    raw: bytes | None = None

    def message(self, host: str) -> bytes:
        if self.raw is not None:
            return self.raw
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {host}", *(f"{k}: {v}" for k, v in self.headers)]
        if self.body is not None and not any(k.lower() == "content-length" for k, _ in self.headers):
            lines.append(f"Content-Length: {len(self.body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + (self.body or b"")


@dataclass
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Connection:
    """One call at a time; opened when needed, and opened again after the server or we have closed it."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._wire: _Wire | None = None
        self.sent = 0.0  # when the last message was handed to the socket

    async def exchange(self, message: bytes | Call, sink: Callable[[Reply], Sink]) -> Reply:
        """Send it and return when the whole answer has come. `sink` says, once the head is there, where the body
        goes."""
        return await self._attempt(message, lambda wire: wire.whole(sink))

    async def send(self, call: Call) -> Reply:
        """Send it and read the answer's head; `read` or `chunks` must follow, or `close`."""
        return await self._attempt(call, lambda wire: wire.head())

    async def read(self, reply: Reply) -> bytes:
        return b"".join([piece async for piece in self.chunks(reply)])

    async def chunks(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yield the body as it comes. An end before the framing's own raises IncompleteReadError."""
        assert self._wire is not None
        async for _at, piece in self._wire.pieces():
            yield piece

    async def hang_up(self, call: Call, after: float) -> None:
        """Send it and go away without reading the answer."""
        wire = await self._open()
        wire.write(call.message(self._authority))
        await asyncio.sleep(after)
        await self.close()

    async def close(self) -> None:
        """Close the connection at once, also in the middle of an answer."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None

    async def open(self) -> None:
        """Open the connection before there is anything to send, where the time of opening should not count."""
        if self._wire is None or self._wire.lost:
            await self._open()

    async def _attempt(self, message: bytes | Call, read: Callable[[_Wire], Awaitable[Reply]]) -> Reply:
        data = message.message(self._authority) if isinstance(message, Call) else message
        wire = self._wire
        fresh = wire is None or wire.lost
        if wire is None or fresh:
            wire = await self._open()
        try:
            return await self._once(wire, data, read)
        except (ConnectionError, asyncio.IncompleteReadError):
            if fresh or wire.heard:
                raise
        # The server had closed the idle connection just then.
        return await self._once(await self._open(), data, read)

    async def _once(self, wire: _Wire, data: bytes, read: Callable[[_Wire], Awaitable[Reply]]) -> Reply:
        wire.expect()
        self.sent = time.perf_counter()
        wire.write(data)
        return await read(wire)

    async def _open(self) -> _Wire:
        await self.close()
        loop = asyncio.get_running_loop()
        _, self._wire = await loop.create_connection(_Wire, self._host, self._port, ssl=self._tls)
        return self._wire


class _Wire(asyncio.Protocol):
    """An open connection: parses one answer at a time."""

    def __init__(self) -> None:
        self.lost = False
        self.heard = False  # whether anything of this answer has come
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None  # parser of the awaited answer
        self._sink: Sink | None = None
        self._choose: Callable[[Reply], Sink] | None = None

    def expect(self) -> None:
        """Prepare for a new answer."""
        loop = asyncio.get_running_loop()
        self.heard = False
        self._at = 0.0
        self._reply = Reply(0)
        self._sink = self._choose = None
        self._kept: deque[tuple[float, bytes]] = deque()  # pieces of a body that nobody has asked for yet
        self._headed: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._more: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def head(self) -> Reply:
        await self._headed
        return self._reply

    async def whole(self, sink: Callable[[Reply], Sink]) -> Reply:
        """Wait for the whole answer; call it right after writing: until then nothing can have come."""
        self._choose = sink
        await self._ended
        return self._reply

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        while True:
            while self._kept:
                yield self._kept.popleft()
            if self._ended.done():
                break
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        await self._ended

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        if self._parser is None:
            self.abort()  # it speaks without being asked
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"the answer is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._parser is None or self._ended.done():
            return
        until_the_end = self._headed.done() and not self._framed()
        if until_the_end and error is None:
            self.on_message_complete()
        elif self.heard:
            self._fail(asyncio.IncompleteReadError(b"", None))
        else:
            self._fail(error or ConnectionResetError("the server closed the connection without an answer"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._reply.status = self._parser.get_status_code()
        if not self._headed.done():
            self._headed.set_result(None)
        if self._choose is not None:
            self._sink = self._choose(self._reply)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink(self._at, body)
        else:
            self._kept.append((self._at, body))
            self._wake()

    def on_message_complete(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        self._wake()
        if not self.lost and self._parser is not None and not self._parser.should_keep_alive():
            self.lost = True
            self.abort()

    def _framed(self) -> bool:
        headers = self._reply.headers
        return "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _fail(self, error: Exception) -> None:
        for future in (self._headed, self._ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # one of the two may never be waited for: that is no news
        self._wake()

