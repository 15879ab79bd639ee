"""The outer layers of every HTTP request: its id, its size limit, and the one line that is logged at its end."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spillover.server.errors import ApiError, error_response
from spillover.server.front import Front
from spillover.server.generation import Job
from spillover.units import format_bytes

log = logging.getLogger("spillover.access")

# Asked for every second by dashboards and probes: not logged.
_QUIET = ("/health", "/ping", "/metrics", "/live", "/page/", "/favicon.ico")


class RequestLog:
    """Gives each request an id, and writes one line when it is over. Never a word of a prompt."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = secrets.token_hex(12)
        start, status = time.monotonic(), 499  # nothing was sent: the client had gone

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            if self._front.settings.log_requests and not scope["path"].startswith(_QUIET):
                log.info("%s", self._line(scope, request_id, status, time.monotonic() - start))

    def _line(self, scope: Scope, request_id: str, status: int, seconds: float) -> str:
        path = scope["path"][:128].encode("unicode_escape").decode()
        line = f"{scope['method']} {path} {status} {seconds * 1e3:.0f} ms id={request_id}"
        jobs: list[Job] = scope.get("spillover.jobs") or []
        if not jobs:
            return line
        requests = [request for job in jobs for request in job.requests]
        first = min((r.first_token for r in requests if r.first_token), default=0.0)
        reasons = sorted({request.finish_reason or "aborted" for request in requests})
        line += (f" prompt={sum(job.num_prompt for job in jobs)}"
                 f" cached={sum(job.requests[0].sources.cached for job in jobs if job.requests[0].sources)}"
                 f" output={sum(len(r.token_ids) - r.num_prompt for r in requests)} ended={'+'.join(reasons)}")
        if first:
            line += f" ttft={(first - min(r.arrived for r in requests)) * 1e3:.0f} ms"
        return line + (_prompts(self._front, jobs) if self._front.settings.log_prompts else "")


class BodyLimit:
    """Refuses a body that is too large; no more than the limit of it is held in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        # A client that is cut off in mid-body seldom reads the answer, so what is sent is taken in, up to a point.
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
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            while message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size <= self._limit:
                    return message
                if not message.get("more_body") or size > self._patience:
                    raise self._too_large(max(size, expected))
                message = await receive()
            return message

        await self._app(scope, counted, send)

    def _too_large(self, size: int) -> ApiError:
        return ApiError(413, f"The body has {format_bytes(size)} ({size} bytes), but at most "
                             f"{format_bytes(self._limit)} ({self._limit} bytes) are taken; see --max-request-bytes.",
                        code="request_too_large", headers={"Connection": "close"})


def _prompts(front: Front, jobs: list[Job]) -> str:
    def shown(job: Job) -> Any:
        ids = job.requests[0].prompt_token_ids
        return job.text if job.text is not None else (
            front.client.tokenizer.decode(ids, False) if front.client.tokenizer is not None else ids)

    return " prompt_text=" + " | ".join(repr(shown(job)) for job in jobs)
