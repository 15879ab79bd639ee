"""HTTP/1.1 client over one connection, for the router and the load generator: one request at a time, any framing,
responses parsed as they arrive, with the arrival time of their bytes, and with flow control.

A general client library spends more time on a request than the server under test does. Bytes are timestamped when the
event loop delivers them, before parsing, so that a client busy with one stream does not delay another's timestamps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

Sink = Callable[[float, bytes], None]  # called with the arrival time and the bytes of each chunk of a body

HELD_BYTES = 262_144  # maximum bytes of unread body to buffer; above it, reading from the server is paused


class NoAnswer(ConnectionError):  # noqa: N818
    """No response head arrived: the connection could not be made, was closed before, or timed out."""


class BrokenOff(ConnectionError):  # noqa: N818
    """An error in the middle of a response."""


class Wire(asyncio.Protocol):
    """An open connection. Call `send` and wait for `head_received`; then read every `chunk`, or wait for `ended` if a
    sink receives them."""

    head_received: asyncio.Future[None]
    ended: asyncio.Future[None]

    def __init__(self) -> None:
        self.lost = False
        self.any_received = False  # whether any byte of the current response has arrived
        self.abandoned = False  # whether the caller no longer waits for the response
        self.complete = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # response headers, names in lower case
        self.last_activity = 0.0  # time.perf_counter() when the last bytes arrived, or when the request was sent
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._choose: Callable[[], Sink] | None = None
        self._sink: Sink | None = None
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._error: Exception | None = None
        self._more: asyncio.Future[None] | None = None
        self._keep = False
        self._until_end = False  # whether the body ends where the connection is closed

    def send(self, message: bytes, choose: Callable[[], Sink] | None = None) -> None:
        """Send a request. `choose` is called when the response head has arrived and returns the sink for the body."""
        self.any_received = self.complete = self._keep = self._until_end = False
        self.status, self.headers, self._error, self._held = 0, [], None, 0
        self._choose, self._sink = choose, None
        self._chunks.clear()
        loop = asyncio.get_running_loop()
        self.head_received, self.ended = loop.create_future(), loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.last_activity = time.perf_counter()
        if self.lost or self._transport is None:
            self._fail(NoAnswer("the connection was closed"))
            return
        self._transport.write(message)

    async def chunk(self, timeout: float | None = None) -> bytes:
        """Return the next bytes of the body; empty at its end. Raises BrokenOff if the body is cut off, or if no bytes
        arrive for `timeout` seconds."""
        while not self._chunks:
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
                raise BrokenOff(f"no data arrived for {timeout:g} s") from None
        chunk = self._chunks.popleft()
        self._held -= len(chunk)
        if self._held < HELD_BYTES and self._transport is not None and not self.lost:
            with contextlib.suppress(RuntimeError):
                self._transport.resume_reading()
        return chunk

    @property
    def reusable(self) -> bool:
        """Return whether another request may be sent: the response is complete and the connection stays open."""
        return self.complete and self._keep and not self.lost

    def abort(self) -> None:
        """Close the connection immediately, even in the middle of a response."""
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass of it
        self._keep = True

    def data_received(self, data: bytes) -> None:
        self.last_activity = time.perf_counter()
        if self._parser is None or self.complete:
            self.abort()  # the server sent data without a request
            return
        self.any_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail((BrokenOff if self.head_received.done() else NoAnswer)(f"the answer is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.complete:
            return
        if self._until_end and error is None:
            self.on_message_complete()
        elif self.head_received.done():
            self._fail(BrokenOff("the server closed the connection in the middle of an answer"))
        else:
            self._fail(NoAnswer("the server closed the connection without an answer"))

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:  # 100 Continue: the final response follows
            return
        names = dict(self.headers)
        self._until_end = b"content-length" not in names and b"chunked" not in names.get(b"transfer-encoding", b"")
        if not self.head_received.done():
            self.head_received.set_result(None)
        if self._choose is not None:
            self._sink = self._choose()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink(self.last_activity, body)
            return
        self._chunks.append(body)
        self._held += len(body)
        if self._held > HELD_BYTES and self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status < 200 and not self.lost:
            return
        self.complete = True
        self._keep = self._parser is not None and self._parser.should_keep_alive()
        if not self.ended.done():
            self.ended.set_result(None)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        for future in (self.head_received, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks the exception as retrieved: the future may have no waiter
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
