"""One client's connection: uvicorn's HTTP protocol, with limits on what a client may send before a request is complete.

Nothing is known of the client yet, not even its key. So the headers are limited in bytes and number, a request must
arrive within a timeout, pipelined requests wait as unparsed bytes, and the number of connections is limited.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from spillover.server.api.errors import ApiError, error_body

MAX_HEADER_BYTES = 65_536  # limit for request line and headers; also for the trailers of a chunked body
MAX_HEADERS = 256
MIN_BODY_RATE = 16_384  # minimum average bytes per second of a body, on top of the allowance of --client-timeout
_SLICE = 4096  # bytes passed to the parser at once, which bounds how many pipelined requests it can queue
_MAX_WAITING_BYTES = 65_536  # pipelined bytes after the request being served at which reading pauses
_FRAME_BYTES = 16  # upper bound of a chunked body's framing in bytes per byte of body
_PROBE_SECONDS = 0.25  # seconds between two checks whether a client that half-closed the connection still exists


@dataclass
class Connections:
    """State shared by all connections of a server: their limits, and the idle connections, oldest first."""

    max_connections: int
    timeout: float  # seconds
    refused: Callable[[str], None]  # called with the reason of each refusal
    idle: dict[Connection, None] = field(default_factory=dict)

    def protocol(self) -> Any:
        """Return the protocol factory that uvicorn calls for each connection."""
        return partial(Connection, self)


class Connection(HttpToolsProtocol):
    def __init__(self, shared: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._waiting = bytearray()  # bytes not parsed yet, because a request is being served
        self._refusal: ApiError | None = None  # the reason why the parser was stopped
        self._deadline: asyncio.TimerHandle | None = None  # timer for the request that is arriving
        self._began = 0.0  # time when the request's first byte arrived
        self._messages = 0
        self._running: RequestResponseCycle | None = None
        self._ended_by_client = False
        self._probe: asyncio.TimerHandle | None = None
        self._in_message = False  # True between the first byte of a request and the last byte of its body
        self._overhead = 0  # bytes of the message outside its body: headers, framing, trailers
        self._body_bytes = 0
        self._header_bytes = 0

    # From the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._shared.max_connections:
            # Close the connection that has been idle longest to make room for this one.
            oldest = next(iter(self._shared.idle), None)
            if oldest is None:
                self._refuse(ApiError(503, f"The server has {self._shared.max_connections} connections, all of them in "
                                           f"use (--max-connections); try again in a moment.",
                                      code="too_many_connections", headers={"Retry-After": "1"}))
                return
            self._shared.refused("idle_connection")
            oldest.transport.close()
            self._shared.idle.pop(oldest, None)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.idle.pop(self, None)
        self._stop_timers()
        self._unset_keepalive_if_required()
        self._waiting.clear()
        self.pipeline.clear()
        if self._running is not None:  # not always the latest cycle, which is the only one that uvicorn notifies
            self._running.disconnected = self._running.disconnected or not self._running.response_complete
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._waiting += data
        self._parse_waiting()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection: a client may close its half after sending a request, and still gets the response."""
        serving = self._serving()
        if not serving or self._in_message or self.scheme == "https" or self.cycle.scope["http_version"] == "1.0":
            return None
        self._ended_by_client = True
        if not self.cycle.response_started:
            # A client that still reads and one that has gone look alike until something is sent. Every client skips
            # this response; the system of one that has gone resets the connection.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe = self.loop.call_later(_PROBE_SECONDS, self._probe_client)
        return True

    # From the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._messages += 1
        self._overhead = self._body_bytes = self._header_bytes = 0
        self._began = self.loop.time()
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._shared.timeout, self._check_deadline)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._shared.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_message_complete()

    # From the response

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._serving():
            return
        if self.cycle.more_body and not self.transport.is_closing():
            # Refused in mid-body: the rest of the body is ignored. The deadline of the message still applies.
            return
        self._parse_waiting()
        if self._ended_by_client and not self._serving():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Send a 400 response where the parser stopped: at a limit of this module, or at invalid HTTP."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or ApiError(400, "This is not a valid HTTP/1.1 request.", code="malformed_http"))

    # Internal

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _serving(self) -> bool:
        """Return whether a received request has not been answered yet; `cycle` is the latest request."""
        return self.cycle is not None and not self.cycle.response_complete

    def _parse_waiting(self) -> None:
        """Parse the received bytes; while a request is being served, only up to the end of a request."""
        while self._waiting and not self.transport.is_closing() and not (
                self._serving() and not self._in_message):
            part = bytes(self._waiting[:_SLICE])
            del self._waiting[:_SLICE]
            body, message = self._body_bytes, self._messages
            super().data_received(part)
            if self._in_message and message == self._messages:
                self._overhead += len(part) - (self._body_bytes - body)
                if self._overhead > MAX_HEADER_BYTES + _FRAME_BYTES * self._body_bytes:
                    self._refuse(_too_large())
        if self.transport.is_closing():
            self._waiting.clear()
        elif len(self._waiting) > _MAX_WAITING_BYTES:
            self.flow.pause_reading()
        elif not self._serving() and not self._in_message:
            self._rest()

    def _rest(self) -> None:
        """Mark the connection as idle: it is kept for a while, unless its place is needed for another connection."""
        self._shared.idle[self] = None
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive,
                                                                self.timeout_keep_alive_handler)

    def _count_header(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _too_large()
            raise self._refusal  # stops the parser, which then calls send_400_response

    def _check_deadline(self) -> None:
        """Close a slow client's connection, unless its body arrives fast enough or reading is paused by the server."""
        self._deadline = None
        if not self._in_message or self.transport.is_closing():
            return
        now = self.loop.time()
        until = self._began + self._shared.timeout + self._body_bytes / MIN_BODY_RATE
        if self.flow.read_paused:
            until = now + self._shared.timeout
        if now < until:
            self._deadline = self.loop.call_later(until - now, self._check_deadline)
        else:
            self._refuse(ApiError(408, f"The request did not arrive within {self._shared.timeout:g} s and the time "
                                       f"that its size takes at {MIN_BODY_RATE // 1024} KiB/s (--client-timeout).",
                                  code="client_timeout"))

    def _probe_client(self) -> None:
        self._probe = None
        if self.transport.is_closing():
            return
        connected: socket.socket = self.transport.get_extra_info("socket")
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._probe = self.loop.call_later(_PROBE_SECONDS, self._probe_client)

    def _refuse(self, error: ApiError) -> None:
        """Send an error and close; if a response is already under way, close after it instead."""
        assert error.code is not None
        self._shared.refused(error.code)
        self._waiting.clear()
        self._in_message = False
        if self._serving() and not self.cycle.more_body:
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if self.pipeline or (self._serving() and self.cycle.response_started):
            self.transport.close()
            return
        body = error_body(error)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close",
                   **error.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._deadline, self._probe):
            if timer is not None:
                timer.cancel()
        self._deadline = self._probe = None


def _too_large() -> ApiError:
    return ApiError(431, f"The request's headers are larger than {MAX_HEADER_BYTES // 1024} KiB, or more than "
                         f"{MAX_HEADERS}.", code="headers_too_large")
