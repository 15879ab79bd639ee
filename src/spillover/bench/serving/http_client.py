"""The load generator's HTTP client: calls over one connection that is reopened when needed, and the arrival time of
their bytes (`http_wire.py`)."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from spillover.http_wire import NoAnswer, Sink, Wire


@dataclass(frozen=True)
class Call:
    """One HTTP request. `raw` replaces the whole message, for malformed ones that no library would send."""

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
    """A connection for one call at a time; opened when needed, and reopened after either side has closed it."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._wire: Wire | None = None
        self.sent = 0.0  # time at which the last message was passed to the socket

    async def exchange(self, message: bytes | Call, sink: Callable[[Reply], Sink]) -> Reply:
        """Send a message and return when its whole answer has arrived. `sink` is called once the head has been read and
        returns where the body goes."""
        replies: list[Reply] = []

        def choose() -> Sink:
            replies.append(_reply(self._open_wire))
            return sink(replies[-1])

        await self._attempt(message, lambda wire: wire.ended, choose)
        return replies[-1]

    async def send(self, call: Call) -> Reply:
        """Send a call and read the answer's head; `read`, `chunks` or `close` must follow."""
        return _reply(await self._attempt(call, lambda wire: wire.head_received, None))

    async def read(self, reply: Reply) -> bytes:
        return b"".join([chunk async for chunk in self.chunks(reply)])

    async def chunks(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises BrokenOff if it ends before the framing says so."""
        while chunk := await self._open_wire.chunk():
            yield chunk

    async def hang_up(self, call: Call, after: float) -> None:
        """Send a call and close the connection after `after` seconds without reading the answer."""
        (await self._open()).send(call.message(self._authority))
        await asyncio.sleep(after)
        await self.close()

    async def close(self) -> None:
        """Close the connection at once, even in the middle of an answer."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None

    async def open(self) -> None:
        """Open the connection before the first message, so that the time of opening does not count."""
        if self._wire is None or not self._wire.reusable:
            await self._open()

    @property
    def _open_wire(self) -> Wire:
        assert self._wire is not None
        return self._wire

    async def _attempt(self, message: bytes | Call, awaited: Callable[[Wire], Awaitable[None]],
                       choose: Callable[[], Sink] | None) -> Wire:
        data = message.message(self._authority) if isinstance(message, Call) else message
        wire, kept = self._wire, True
        if wire is None or not wire.reusable:
            wire, kept = await self._open(), False
        while True:
            self.sent = time.perf_counter()
            wire.send(data, choose)
            try:
                await awaited(wire)
                return wire
            except NoAnswer:
                if not kept or wire.any_received:
                    raise
            wire, kept = await self._open(), False  # the server had closed the idle connection at that moment

    async def _open(self) -> Wire:
        await self.close()
        loop = asyncio.get_running_loop()
        _, self._wire = await loop.create_connection(Wire, self._host, self._port, ssl=self._tls)
        return self._wire


def _reply(wire: Wire) -> Reply:
    return Reply(wire.status, {name.decode("latin-1"): value.decode("latin-1").strip() for name, value in wire.headers})
