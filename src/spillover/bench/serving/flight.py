"""One request in flight: its bytes are sent on a connection, and its answer is read as it arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from spillover.bench.serving.http_client import Call, Connection, Reply
from spillover.bench.serving.openai_api import Answer, refusal
from spillover.bench.serving.sse import EventParser
from spillover.http_wire import BrokenOff, Sink

OnTokens = Callable[[float, int, bool], None]  # called with the seconds since sending, the new tokens, and if first


class Flight:
    def __init__(self, connection: Connection, on_tokens: OnTokens) -> None:
        self.answer = Answer()
        self._connection, self._on_tokens = connection, on_tokens
        self._parser = EventParser()
        self._refused: list[bytes] = []

    @property
    def sent(self) -> float | None:
        """Return when the request's bytes were passed to the socket; None if no connection could be opened."""
        return self._connection.sent or None

    async def run(self, call: Call, timeout: float) -> bool:
        """Send the call and read the answer; return whether the connection is reusable. Errors go to `answer.error`."""
        answer, connection = self.answer, self._connection
        connection.sent = 0.0
        try:
            async with asyncio.timeout(timeout):
                reply = await connection.exchange(call, self._sink)
        except TimeoutError:
            answer.error = answer.error or f"not finished within {timeout:g} s"
        except BrokenOff:
            answer.error = answer.error or "the connection broke before the answer was complete"
        except OSError as error:
            answer.error = answer.error or str(error) or type(error).__name__
        else:
            self._check_completion(reply)
            return True
        await connection.close()
        return False

    def _sink(self, reply: Reply) -> Sink:
        return self._stream if reply.status == 200 and reply.is_stream else self._keep

    def _stream(self, at: float, chunk: bytes) -> None:
        answer = self.answer
        for data in self._parser.feed(chunk):
            first = not answer.begun
            tokens = answer.add_event(at, data)
            if tokens:
                self._on_tokens(at - self._connection.sent, tokens, first)

    def _keep(self, _at: float, chunk: bytes) -> None:
        self._refused.append(chunk)

    def _check_completion(self, reply: Reply) -> None:
        answer = self.answer
        if reply.status != 200:
            answer.error = refusal(reply.status, b"".join(self._refused))
        elif not reply.is_stream:
            answer.error = f"the answer is {reply.headers.get('content-type', 'of no type')}, not a stream of events"
        elif answer.error is None and not answer.finished:
            answer.error = "the stream ended before the answer was complete"


async def sleep_until(when: float) -> None:
    """Sleep until `when`, a time of `time.perf_counter()`. Event loops count in milliseconds and may wake early."""
    while (left := when - time.perf_counter()) > 0:
        await asyncio.sleep(left)
