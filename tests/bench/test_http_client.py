"""The client's HTTP on real sockets: every framing, connections that close early, and when bytes arrived."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from spillover.bench.serving.http_client import Call, Connection, Reply
from spillover.bench.serving.sse import events
from spillover.http_wire import BrokenOff, NoAnswer, Sink

GET = Call("GET", "/", headers=())
OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.asynccontextmanager
async def answering(*answers: bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
                    ) -> AsyncIterator[tuple[Connection, list[int]]]:
    """Serve these answers, one per request; a function writes its answer itself, as the connection's last. Yield a
    connection to the server, and a list with the number of connections opened."""
    left, opened = list(answers), [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened[0] += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while left:
                await reader.readuntil(b"\r\n\r\n")
                answer = left.pop(0)
                if callable(answer):
                    await answer(writer)
                else:
                    writer.write(answer)
                if b"Connection: close" in (answer if isinstance(answer, bytes) else b"") or callable(answer):
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = Connection("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield connection, opened
    finally:
        await connection.close()
        server.close()


def test_bodies_of_every_framing_over_one_connection() -> None:
    async def run() -> None:
        async with answering(OK + b"Content-Length: 3\r\n\r\nabc",
                             OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n",
                             b"HTTP/1.1 204 No Content\r\n\r\n",
                             OK + b"Connection: close\r\n\r\nuntil the end") as (connection, opened):
            bodies = []
            for _ in range(4):
                reply = await connection.send(GET)
                bodies.append(await connection.read(reply))
            assert bodies == [b"abc", b"abcde", b"", b"until the end"]
            assert opened == [1]

    asyncio.run(run())


def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    async def run() -> None:
        async with answering(OK + b"Connection: close\r\nContent-Length: 1\r\n\r\na",
                             OK + b"Content-Length: 1\r\n\r\nb") as (connection, opened):
            assert await connection.read(await connection.send(GET)) == b"a"
            assert await connection.read(await connection.send(GET)) == b"b"
            assert opened == [2]

    asyncio.run(run())


@pytest.mark.parametrize("answer", [OK + b"Content-Length: 9\r\n\r\nabc",
                                    OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b"HTTP/1.1 200"])
def test_an_end_before_the_end_is_an_error(answer: bytes) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async def run() -> None:
        async with answering(cut) as (connection, _):
            with pytest.raises((BrokenOff, NoAnswer)):
                await connection.read(await connection.send(GET))

    asyncio.run(run())


def test_what_is_not_http_is_an_error() -> None:
    async def run() -> None:
        async with answering(b"hello there\r\n\r\n") as (connection, _):
            with pytest.raises(NoAnswer, match="not HTTP"):
                await connection.send(GET)

    asyncio.run(run())


def test_pieces_carry_the_time_at_which_they_came() -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for letter in (b"a", b"b"):
            await asyncio.sleep(0.05)
            writer.write(b"1\r\n" + letter + b"\r\n")
        writer.write(b"0\r\n\r\n")

    async def run() -> None:
        seen: list[tuple[float, bytes]] = []

        def sink(reply: Reply) -> Sink:
            assert reply.is_stream
            return lambda at, piece: seen.append((at, piece))

        async with answering(slowly) as (connection, _):
            before = time.perf_counter()
            reply = await connection.exchange(GET, sink)
            assert (reply.status, [piece for _, piece in seen]) == (200, [b"a", b"b"])
            assert before <= connection.sent <= seen[0][0] - 0.04
            assert seen[1][0] - seen[0][0] >= 0.04

    asyncio.run(run())


def test_events_over_a_connection() -> None:
    async def run() -> None:
        body = b"data: 1\n\n: ping\n\ndata: [DONE]\n\n"
        async with answering(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as (connection, _):
            reply = await connection.send(GET)
            assert [data async for data in events(connection.chunks(reply))] == [b"1", b"[DONE]"]

    asyncio.run(run())
