"""Protection of a server without keys against pages of other sites: which origins and host names are allowed."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from spillover.server.api.errors import ApiError, error_response
from spillover.server.api.probes import PROBES  # load balancers may request these under any host name

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # these change nothing, and browsers hide their responses from other sites


class SameSite:
    """Middleware that refuses requests from another site's page, by their Origin or their Host header."""

    def __init__(self, app: ASGIApp, host: str, origins: tuple[str, ...], hosts: tuple[str, ...]) -> None:
        self._app = app
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._hosts = frozenset(name.lower().rstrip(".") for name in (host, socket.gethostname(), *hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        scope["spillover.refusal"] = error.code
        await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        host = _header(scope, b"host")
        if scope["path"] not in PROBES and not self._known(host):
            name = _name(host)
            return ApiError(403, f"This server is not known as '{name[:128]}'; if it should be, start it with "
                                 f"--allowed-host {name[:128]}.", code="unknown_host")
        origin = _header(scope, b"origin").lower()
        if scope["method"] in _SAFE_METHODS or not origin or "*" in self._origins or origin in self._origins:
            return None
        if urlsplit(origin).netloc == host.lower() and host:
            return None
        return ApiError(403, f"Pages of {origin[:128]} may not use this server; if they should, start it with "
                             f"--cors-origin {origin[:128]}.", code="foreign_origin")

    def _known(self, host: str) -> bool:
        """Return whether a host is allowed: a given name, an address, or a dotless name, which no site can own."""
        name = _name(host)
        return ("." not in name or "*" in self._hosts or name in self._hosts or name.endswith(".localhost")
                or _is_address(name))


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value for name, value in scope["headers"] if name == wanted), b"").decode("latin-1").strip()


def _name(host: str) -> str:
    """Return a host without its port, as in example.org:80 or [::1]:80."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
