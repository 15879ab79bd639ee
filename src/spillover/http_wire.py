"""HTTP/1.1 over one connection, for a router and a load generator: one request at a time, any framing, answers parsed
as they come, with the time at which their bytes came, and read no faster than they are taken.

A general client library spends more time on a request than a server under test does. Bytes get their time where the
event loop hands them over, before anything is parsed, so that a client busy with one stream does not age another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

Sink = Callable[[float, bytes], None]  # gets the time and the bytes of each piece of a body

HELD_BYTES = 262_144  # of a body that waits for its reader; then no more is read from the server


class NoAnswer(ConnectionError):  # noqa: N818
    """No head of an answer came: the connection could not be made, or ended or stayed silent before."""


class BrokenOff(ConnectionError):  # noqa: N818
    """An error in the middle of an answer."""


class Wire(asyncio.Protocol):
    """An open connection. `send`, then wait for `headed`; then take every `piece`, or wait for `ended` where a sink
    takes them."""

    headed: asyncio.Future[None]
    ended: asyncio.Future[None]

    def __init__(self) -> None:
        self.lost = False
        self.heard = False  # whether anything of this answer has come
        self.given_up = False  # nobody waits for the answer any more
        self.complete = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self.latest = 0.0  # when its last bytes came, or its request went; monotonic
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._choose: Callable[[], Sink] | None = None
        self._sink: Sink | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._error: Exception | None = None
        self._more: asyncio.Future[None] | None = None
        self._keep = False
        self._until_end = False  # the body is framed by the end of the connection

    def send(self, message: bytes, choose: Callable[[], Sink] | None = None) -> None:
        """Write a request. `choose` is called once the head of the answer is there, and says where its body goes."""
        self.heard = self.complete = self._keep = self._until_end = False
        self.status, self.headers, self._error, self._held = 0, [], None, 0
        self._choose, self._sink = choose, None
        self._pieces.clear()
        loop = asyncio.get_running_loop()
        self.headed, self.ended = loop.create_future(), loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.latest = time.perf_counter()
        if self.lost or self._transport is None:
            self._fail(NoAnswer("the connection was closed"))
            return
        self._transport.write(message)

    async def piece(self, timeout: float | None = None) -> bytes:
        """Return the next bytes of the body; none at its end. BrokenOff if it ends before, or nothing comes for
        `timeout` seconds."""
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
        """Return whether another request may be sent: the answer is whole, and the server keeps the connection."""
        return self.complete and self._keep and not self.lost

    def abort(self) -> None:
        """Close the connection at once, also in the middle of an answer."""
        if self._transport is not None:
            self._transport.abort()

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._keep = True

    def data_received(self, data: bytes) -> None:
        self.latest = time.perf_counter()
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
        if self._choose is not None:
            self._sink = self._choose()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink(self.latest, body)
            return
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
        self._keep = self._parser is not None and self._parser.should_keep_alive()
        if not self.ended.done():
            self.ended.set_result(None)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        for future in (self.headed, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for it
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
