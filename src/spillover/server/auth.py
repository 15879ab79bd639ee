"""API keys: `Authorization: Bearer KEY`, compared in constant time. Off unless keys are given."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from spillover.server.api.errors import ApiError, error_response

# What a load balancer needs to see, and the page itself; what the page shows is asked for with the key.
OPEN_PATHS = frozenset(("/health", "/ping", "/version", "/", "/docs", "/openapi.json", "/favicon.ico"))
OPEN_PREFIX = "/page/"


# What changes the state of the server for everybody.
ADMIN_PATHS = frozenset(("/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile"))


class ApiKeys:
    """Middleware that asks for a key: one of `keys` on most routes, one of `admin_keys` (if any) on ADMIN_PATHS."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._admin_digests = [_digest(key.encode()) for key in admin_keys] or self._digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            admin = "the --admin-api-key" if scope["path"] in ADMIN_PATHS and self._admin_digests is not self._digests \
                else "one of the keys"
            error = ApiError(401, f"An API key is needed: send the header Authorization: Bearer KEY, with {admin} "
                                  f"the server was started with.", code="invalid_api_key",
                             headers={"WWW-Authenticate": "Bearer"})
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path: str = scope["path"]
        digests = self._admin_digests if path in ADMIN_PATHS else self._digests
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or not digests:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, whichever fits, so that the time taken says nothing.
        fits = [hmac.compare_digest(digest, known) for known in digests]
        return kind.lower() == b"bearer" and any(fits)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
