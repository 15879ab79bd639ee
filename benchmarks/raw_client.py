"""HTTP/1.1 over one socket, as little as load needs: keep-alive, bodies of both framings, server-sent events.

A general client library spends more time on a request than the server under test does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


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

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, call: Call) -> Reply:
        """Sends it and reads the answer's head; `read` or `chunks` must follow, or `close`."""
        message = call.message(f"{self._host}:{self._port}")
        fresh = self._reader is None or self._reader.at_eof()
        if fresh:
            await self._open()
        try:
            return await self._exchange(message)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if fresh or getattr(error, "partial", b""):
                raise
        await self._open()  # the server had closed the idle connection just then
        return await self._exchange(message)

    async def read(self, reply: Reply) -> bytes:
        return b"".join([piece async for piece in self.chunks(reply)])

    async def chunks(self, reply: Reply) -> AsyncIterator[bytes]:
        """The body as the server framed it. An end before the framing's own raises IncompleteReadError."""
        assert self._reader is not None
        if reply.headers.get("transfer-encoding", "").lower() == "chunked":
            while True:
                size = int((await self._line()).split(b";")[0], 16)
                piece = await self._reader.readexactly(size + 2)
                if size == 0:
                    break
                yield piece[:-2]
        elif "content-length" in reply.headers:
            yield await self._reader.readexactly(int(reply.headers["content-length"]))
        else:
            yield await self._reader.read()
            await self.close()
        if reply.headers.get("connection", "").lower() == "close":
            await self.close()

    async def hang_up(self, call: Call, after: float) -> None:
        """Sends it and goes away without reading the answer."""
        await self._open()
        assert self._writer is not None
        self._writer.write(call.message(f"{self._host}:{self._port}"))
        await self._writer.drain()
        await asyncio.sleep(after)
        await self.close()

    async def close(self) -> None:
        """At once, also in the middle of an answer."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None

    async def _open(self) -> None:
        await self.close()
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)

    async def _exchange(self, message: bytes) -> Reply:
        assert self._reader is not None
        assert self._writer is not None
        # A server may answer and close before it has read all that is too large for it: its answer still counts.
        with contextlib.suppress(ConnectionError):
            self._writer.write(message)
            await self._writer.drain()
        status = await self._line()
        reply = Reply(int(status.split()[1]))
        while (line := await self._line()) not in (b"\r\n", b"\n"):
            name, _, value = line.decode("latin-1").partition(":")
            reply.headers[name.strip().lower()] = value.strip()
        return reply

    async def _line(self) -> bytes:
        assert self._reader is not None
        return await self._reader.readuntil(b"\n")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data` of each server-sent event."""
    buffer = b""
    async for piece in pieces:
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            event, buffer = buffer[:end], buffer[end + 2:]
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line.removeprefix(b"data:").strip()
    if buffer.strip():
        raise ValueError(f"the stream ends in half an event: {buffer[-80:]!r}")
