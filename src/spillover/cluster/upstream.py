"""HTTP/1.1 to one replica, with persistent connections and streamed bodies. An error before the head of an answer is a
NoAnswer, after which the request may be sent to another replica."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

from spillover.errors import SpilloverError
from spillover.http_wire import BrokenOff, NoAnswer, Wire

Headers = Sequence[tuple[bytes, bytes]]

MOST_IDLE = 256  # maximum number of idle connections kept


class Answer:
    """An answer whose head has arrived. `close` must follow, whether or not the body was read."""

    def __init__(self, wire: Wire, pool: Upstream) -> None:
        self.status, self.headers = wire.status, wire.headers
        self._wire = wire
        self._pool = pool

    def header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self.headers if name == wanted), b"")

    @property
    def is_stream(self) -> bool:
        return self.header(b"content-type").startswith(b"text/event-stream")

    async def chunks(self, timeout: float) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; BrokenOff if it is incomplete, or if nothing arrives for `timeout` seconds."""
        while True:
            chunk = await self._wire.chunk(timeout)
            self._pool.answer_begun(self._wire)
            if not chunk:
                return
            yield chunk

    def close(self) -> None:
        self._pool.release(self._wire)


class Upstream:
    """One replica's address and connections."""

    def __init__(self, url: str, key: str | None = None, connect_seconds: float = 2.0) -> None:
        """Connect to the server at `url`. `key` is sent as `Authorization: Bearer` with requests that have none."""
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
        self._idle: list[Wire] = []
        self._unanswered: set[Wire] = set()  # connections with a request but no byte of the answer's body yet
        self._busy: set[Wire] = set()  # connections with a request

    async def request(self, method: str, path: str, headers: Headers = (), body: bytes = b"", *,
                      timeout: float) -> Answer:
        """Send a request and return the answer once its head has arrived; NoAnswer if not within `timeout` seconds."""
        message = self._message(method, path, headers, body)
        while True:
            wire, kept = await self._wire()
            self._unanswered.add(wire)
            self._busy.add(wire)
            try:
                wire.send(message)
                async with asyncio.timeout(timeout):
                    await wire.head_received
                return Answer(wire, self)
            except TimeoutError:
                self._forget(wire)
                wire.abort()
                raise NoAnswer(f"{self.url} did not answer within {timeout:g} s") from None
            except NoAnswer:
                self._forget(wire)
                if not kept or wire.any_received or wire.abandoned:  # otherwise the server closed an idle connection
                    raise
            except BaseException:
                self._forget(wire)
                wire.abort()
                raise

    async def fetch(self, method: str, path: str, headers: Headers = (), body: bytes = b"", *,
                    timeout: float, limit: int = 1 << 23) -> tuple[Answer, bytes]:
        """Send a request and return the complete answer; NoAnswer if it is incomplete."""
        answer = await self.request(method, path, headers, body, timeout=timeout)
        try:
            whole = bytearray()
            async for chunk in answer.chunks(timeout):
                whole += chunk
                if len(whole) > limit:
                    raise NoAnswer(f"{self.url}{path} answered with more than {limit} bytes")
            return answer, bytes(whole)
        except BrokenOff as error:
            raise NoAnswer(str(error)) from None
        finally:
            answer.close()

    def abort_unanswered(self) -> None:
        """Abort every request without an answer so far, so that it is sent to another replica."""
        for wire in list(self._unanswered):
            wire.abandoned = True
            wire.abort()

    def abort_stalled(self, since: float) -> None:
        """Abort every answer without a byte since then, by the monotonic clock; its client gets an error."""
        for wire in list(self._busy):
            if wire.last_activity < since:
                wire.abort()

    def answer_begun(self, wire: Wire) -> None:
        """Record that the answer on this connection has begun, or will not."""
        self._unanswered.discard(wire)

    def _forget(self, wire: Wire) -> None:
        self._unanswered.discard(wire)
        self._busy.discard(wire)

    def release(self, wire: Wire) -> None:
        self._forget(wire)
        if wire.reusable and len(self._idle) < MOST_IDLE:
            self._idle.append(wire)
        else:
            wire.abort()

    def close(self) -> None:
        for wire in (*self._idle, *self._unanswered):
            wire.abort()
        self._idle.clear()

    async def _wire(self) -> tuple[Wire, bool]:
        while self._idle:
            wire = self._idle.pop()
            if not wire.lost:
                return wire, True
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, wire = await asyncio.get_running_loop().create_connection(Wire, self._host, self._port,
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
