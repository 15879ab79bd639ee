"""Error responses in OpenAI's format: {"error": {"message", "type", "param", "code"}}. No traceback is ever sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spillover.errors import EngineDead, QueueFull, SpilloverError

log = logging.getLogger("spillover.server")

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
          500: "server_error", 503: "service_unavailable_error"}
_SENTENCES = {404: "There is no {method} {path} here; GET /openapi.json lists all routes.",
              405: "{path} does not accept {method}; GET /openapi.json lists the methods of each route."}

# Codes of requests refused for the server's limits or for safety; /metrics counts each.
REFUSALS = ("request_too_large", "too_many_values", "too_deep", "too_many_messages", "bodies_busy",
            "unsupported_media_type", "foreign_origin", "unknown_host", "admin_routes_off", "headers_too_large",
            "malformed_http", "client_timeout", "too_many_connections", "idle_connection", "grammar_size",
            "chat_template_limit")


class ApiError(Exception):
    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Return the error to show a client; an unexpected one is logged with its traceback under the request's id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, SpilloverError):
        return ApiError(400, str(error), code=error.code)
    log.error("%s failed", request_id, exc_info=error)
    return ApiError(500, f"Something went wrong inside the server; its log has the cause under {request_id}.",
                    code="internal_error")


def error_body(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, media_type="application/json")


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return pydantic's findings as one sentence; the first finding determines the parameter."""
    # A field with several forms is reported once per form; the deepest path belongs to the form that was meant.
    first = str(field_path(problems[0]["loc"]) or "").partition(".")[0]
    paths = [field_path(problem["loc"]) for problem in problems]
    param = max((path for path in paths if path and path.partition(".")[0] == first), default=paths[0],
                key=lambda path: path.count("."))
    found = dict.fromkeys(str(problem["msg"]).removeprefix("Value error, ") for problem in problems
                          if field_path(problem["loc"]) == param)
    text = "; or ".join(list(found)[:4])
    return ApiError(400, f"{param}: {text}" if param else text, param)


def field_path(loc: Sequence[int | str]) -> str | None:
    """Return a path like messages.0.content, without the names of alternative forms that pydantic adds."""
    parts = [str(part) for part in loc if not _is_form(part)]
    # A form with its own type is named like that type, and often so is the field inside.
    return ".".join(part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1])[:256] or None


def _is_form(part: int | str) -> bool:
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or "-" in part
                                      or part in ("str", "int", "float", "bool"))


def add_error_handlers(app: FastAPI) -> None:
    async def expected(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error, request.scope.get("request_id", ""))
        request.scope["spillover.refusal"] = api_error.code
        return error_response(api_error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        template = _SENTENCES.get(error.status_code, str(error.detail))
        message = template.format(method=request.method, path=request.url.path) if "{" in template else template
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    for kind in (ApiError, SpilloverError):
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


class LastResort:
    """The outermost layer: an error without a handler becomes a 500 without a traceback, or ends the stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            answer = as_api_error(error, scope.get("request_id", ""))
            scope["spillover.refusal"] = answer.code
            if not started:
                await error_response(answer)(scope, receive, send)
