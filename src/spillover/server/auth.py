"""API keys: `Authorization: Bearer KEY`, compared in constant time. Off unless keys are given."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from spillover.server.errors import ApiError, error_response

# What a load balancer needs to see, and the page itself; what the page shows is asked for with the key.
OPEN_PATHS = frozenset(("/health", "/ping", "/version", "/", "/favicon.ico"))
OPEN_PREFIX = "/page/"


class ApiKeys:
    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            error = ApiError(401, "An API key is needed: send the header Authorization: Bearer KEY, with one of the "
                                  "keys the server was started with.", code="invalid_api_key",
                             headers={"WWW-Authenticate": "Bearer"})
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, whichever fits, so that the time taken says nothing.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(fits)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
