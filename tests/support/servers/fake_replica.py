"""An OpenAI server in the test's own event loop that fails on command; and a router for several of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from spillover.cluster.serve import Router
from spillover.cluster.settings import RouterSettings
from spillover.cluster.upstream import Upstream
from spillover.cluster.watch import WatchSettings
from spillover.server.listen import listen

CHUNKS = 5


class FakeReplica:
    """`how` sets the treatment of the next requests: ok, silent, refuse (503), busy (429), drop (no answer), drop-head
    (only the head), drop-middle (connection closed after two chunks), hang-middle (nothing after two chunks, and no
    answer to health checks either)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.how = "ok"
        self.healthy = True
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.open = 0  # requests in progress
        self.port = 0
        self.hung = False
        self._release = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop as a killed process does: the port is closed and every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    def release(self) -> None:
        """Let silent requests continue."""
        self._release.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next((int(line.split(":")[1]) for line in head.split("\r\n")
                               if line.lower().startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                path = head.split(" ")[1]
                if self.hung:
                    await self._release.wait()
                if path.endswith(("/completions", "/responses")):
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.open += 1
                    try:
                        if not await self._generate(body, writer, reader):
                            break
                    finally:
                        self.open -= 1
                elif path == "/health":
                    _whole(writer, 200 if self.healthy else 503, {"status": "ok"})
                elif path == "/v1/models":
                    _whole(writer, 200, {"data": [{"id": "fake"}]})
                elif path.startswith("/v1/responses/"):
                    self.heads.append(head)
                    _whole(writer, 200, {"from": self.name})
                else:
                    _whole(writer, 404, {})
        self._writers.discard(writer)
        writer.close()

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter,
                        reader: asyncio.StreamReader) -> bool:
        how = self.how
        if how == "silent":
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((asyncio.ensure_future(self._release.wait()), gone),
                               return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return False
            gone.cancel()
        if how in ("refuse", "busy"):
            _whole(writer, 503 if how == "refuse" else 429, {"error": {"message": how}})
            return True
        if how == "drop":
            writer.transport.abort()
            return False
        usage = {"prompt_tokens": 9, "completion_tokens": CHUNKS, "prompt_tokens_details": {"cached_tokens": 0}}
        if not body.get("stream"):
            _whole(writer, 200, {"id": f"resp_{self.name}", "from": self.name, "usage": usage})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        for place in range(CHUNKS):
            if how == "drop-head" or (how == "drop-middle" and place == 2):
                await asyncio.sleep(0)
                writer.transport.abort()
                return False
            if how == "hang-middle" and place == 2:
                self.hung = True
                await self._release.wait()
            data = f"data: {json.dumps({'from': self.name, 'place': place})}\n\n".encode()
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)
        data = f"data: {json.dumps({'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n")
        return True


def _whole(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    data = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
        status, len(data)) + data)


@contextlib.asynccontextmanager
async def routed(count: int, **changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[FakeReplica], Router]]:
    """Yield a client of a router with `count` replicas, all ready; the replicas; and the router."""
    replicas = [FakeReplica(f"fake-{place}") for place in range(count)]
    for replica in replicas:
        await replica.start()
    usual: dict[str, Any] = {"wait_seconds": 1.0, "drain_seconds": 1.0, "log_requests": False,
                             "watch": WatchSettings(health_seconds=0.5)}
    settings = RouterSettings(**(usual | changes))
    router = Router(settings, [(each.name, Upstream(f"http://127.0.0.1:{each.port}")) for each in replicas])
    ready = asyncio.Event()
    with listen("127.0.0.1", 0) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running = asyncio.create_task(router.run(listening, ready.set))
        try:
            async with asyncio.timeout(10):
                await ready.wait()
            async with httpx.AsyncClient(base_url=address, timeout=10) as client:
                yield client, replicas, router
        finally:
            for replica in replicas:
                await replica.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
