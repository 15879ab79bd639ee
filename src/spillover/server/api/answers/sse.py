"""Server-sent events: the streaming response, and the encoding of its chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from spillover.server.api.errors import ApiError, as_api_error, error_body

DONE = b"data: [DONE]\n\n"
# An error before the first token gets its own HTTP status. After this wait for the first token the headers are sent
# anyway, since proxies time out on a server that sends nothing.
_HEADERS_AFTER_SECONDS = 10.0
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]
_encoder = msgspec.json.Encoder()
encode = _encoder.encode
MARK = "\u0000text\u0000"  # placeholder for the text in a TextChunk's template


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


class TextChunk:
    """A chunk with one variable string: everything except this text is encoded once."""

    def __init__(self, chunk: dict[str, Any]) -> None:
        """Prepare a chunk from a template that has MARK in place of the text."""
        self._before, self._after = event(chunk).split(encode(MARK))

    def __call__(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode(text), self._after)


def error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(Response):
    """A response that sends each chunk of a generator in one write; closes the generator if the client disconnects.

    A slow reader delays only its own generator.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes], request_id: str) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(_HEADERS)
        self._chunks = chunks
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
                await asyncio.wait((sending,))
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = asyncio.ensure_future(anext(chunks, b""))
            try:
                await asyncio.wait((first,), timeout=_HEADERS_AFTER_SECONDS)
                if first.done():
                    first.result()  # an error here still becomes an HTTP error response
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    await send(_body(await first))
                    async for chunk in chunks:
                        await send(_body(chunk))
                except Exception as error:
                    await send(_body(error_event(as_api_error(error, self._request_id))))
            finally:
                if not first.done():
                    first.cancel()
                    await asyncio.wait((first,))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
