"""Middleware around every HTTP request: its id, the limit on its body's size, and the line logged when it finishes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spillover.server.api.answers.generation import Job
from spillover.server.api.errors import ApiError, error_response
from spillover.server.api.probes import PROBES
from spillover.server.front import Front
from spillover.units import format_bytes

log = logging.getLogger("spillover.access")

# The number of bodies of the largest size that may be held at once; smaller bodies may be more. The first _SMALL_BODY
# bytes of each body are not counted, so small requests are served even while large ones use up the limit.
BODIES_AT_ONCE = 16
_SMALL_BODY = 65_536

# Paths that dashboards and probes request every second; they are not logged.
_QUIET = (*PROBES, "/metrics", "/live", "/page/", "/favicon.ico", "/kv/info")


class Sent:
    """A `send` that records the response's status and adds headers to it."""

    def __init__(self, send: Send, headers: Callable[[], Iterable[tuple[bytes, bytes]]] = tuple) -> None:
        self.status = 499  # 499 until a response starts: the client has disconnected
        self._send = send
        self._headers = headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers()]
        await self._send(message)


class RequestLog:
    """Middleware that gives each request an id and logs one line when it has finished, without prompts."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = secrets.token_hex(12)
        # While the server drains, close the connection: the client's next request opens a new one, to another server.
        sent = Sent(send, lambda: [(b"x-request-id", request_id.encode()),
                                   *([(b"connection", b"close")] if self._front.draining else ())])
        start = time.monotonic()
        try:
            await self._app(scope, receive, sent)
        finally:
            if self._front.settings.log_requests and not scope["path"].startswith(_QUIET):
                fields = self._fields(scope, request_id, sent.status, time.monotonic() - start)
                log.info("%s", _line(fields), extra={"fields": fields})

    def _fields(self, scope: Scope, request_id: str, status: int, seconds: float) -> dict[str, Any]:
        path = scope["path"][:128].encode("unicode_escape").decode()
        fields: dict[str, Any] = {"method": scope["method"], "path": path, "status": status,
                                  "milliseconds": round(seconds * 1e3), "id": request_id}
        if "spillover.key" in scope:
            fields["key"] = scope["spillover.key"]
        jobs: list[Job] = scope.get("spillover.jobs") or []
        if not jobs:
            return fields
        requests = [request for job in jobs for request in job.requests]
        first = min((r.first_token for r in requests if r.first_token), default=0.0)
        reasons = sorted({request.finish_reason or "aborted" for request in requests})
        fields |= {"prompt": sum(job.num_prompt for job in jobs),
                   "cached": sum(job.requests[0].sources.cached for job in jobs if job.requests[0].sources),
                   "output": sum(len(r.token_ids) - r.num_prompt for r in requests), "ended": "+".join(reasons)}
        if first:
            fields["ttft_milliseconds"] = round((first - min(r.arrived for r in requests)) * 1e3)
        if self._front.settings.log_prompts:
            fields["prompt_text"] = _prompts(self._front, jobs)
        return fields


class BodyLimit:
    """Middleware that refuses bodies that are too large, alone or together with those already held."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._total_limit = BODIES_AT_ONCE * limit
        self._total = 0  # bytes of all bodies that are being received, parsed or prepared
        # A client cut off in mid-body seldom reads the response, so a too large body is read on, up to this many bytes.
        self._patience = 4 * limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        expected = int(announced[:20]) if announced.isdigit() else 0
        if expected > self._patience:
            await error_response(self._too_large(expected))(scope, receive, send)
            return
        size = held = 0

        def release() -> None:
            nonlocal held
            self._total -= held
            held = 0

        async def counted() -> Message:
            nonlocal size, held
            message = await receive()
            while message["type"] == "http.request":
                length = len(message.get("body", b""))
                size += length
                if size <= self._limit:
                    more = max(0, size - _SMALL_BODY) - held
                    if more > 0 and self._total + more > self._total_limit:
                        raise self._busy()
                    held += more
                    self._total += more
                    scope["spillover.body_bytes"] = size
                    return message
                release()  # the rest of a too large body is counted and dropped
                if not message.get("more_body") or size > self._patience:
                    raise self._too_large(max(size, expected))
                message = await receive()
            return message

        scope["spillover.release_body"] = release
        try:
            await self._app(scope, counted, send)
        finally:
            release()

    def _busy(self) -> ApiError:
        return ApiError(429, f"Request bodies of {format_bytes(self._total_limit)} are being read and parsed already; "
                             f"try again in a moment, or start the server with a larger --max-request-bytes.",
                        code="bodies_busy", headers={"Connection": "close", "Retry-After": "1"})

    def _too_large(self, size: int) -> ApiError:
        return ApiError(413, f"The body has {format_bytes(size)} ({size} bytes), but at most "
                             f"{format_bytes(self._limit)} ({self._limit} bytes) are allowed; see --max-request-bytes.",
                        code="request_too_large", headers={"Connection": "close"})


def _line(fields: dict[str, Any]) -> str:
    line = "{method} {path} {status} {milliseconds} ms id={id}".format_map(fields)
    shown = ("key", "prompt", "cached", "output", "ended")
    line += "".join(f" {name}={fields[name]}" for name in shown if name in fields)
    line += f" ttft={fields['ttft_milliseconds']} ms" if "ttft_milliseconds" in fields else ""
    return line + (f" prompt_text={fields['prompt_text']}" if "prompt_text" in fields else "")


def _prompts(front: Front, jobs: list[Job]) -> str:
    def shown(job: Job) -> Any:
        ids = job.requests[0].prompt_token_ids
        return job.text if job.text is not None else (
            front.client.tokenizer.decode(ids, False) if front.client.tokenizer is not None else ids)

    return " | ".join(repr(shown(job)) for job in jobs)
