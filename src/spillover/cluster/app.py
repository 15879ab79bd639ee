"""The router's HTTP application: its own routes, the forwarded routes, and the middleware around both."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import spillover
from spillover.cluster.fleet import Fleet
from spillover.cluster.metrics import RouterMetrics
from spillover.cluster.proxy import ROUTED, Proxy, Route
from spillover.cluster.replica import Replica
from spillover.cluster.settings import RouterSettings
from spillover.cluster.watch import Watcher, clock
from spillover.server.access import BodyLimit, Sent
from spillover.server.api.errors import ApiError, LastResort, error_response
from spillover.server.auth import ApiKeys, KeyRing
from spillover.server.origin import SameSite

log = logging.getLogger("spillover.access")

FORWARDED = ("/v1/models", "/tokenize", "/detokenize", "/v1/responses/", "/v1/embeddings")  # and paths below
_QUIET = ("/health", "/ping", "/metrics", "/replicas", "/livez", "/readyz")
_NAME = re.compile(r"/replicas/([^/]+)/(drain|undrain)")
_REQUEST_ID = re.compile(rb"[\w.-]{1,128}")


class RouterApp:
    """The innermost layer: answers the router's own routes and forwards the others."""

    def __init__(self, fleet: Fleet, watchers: list[Watcher], proxy: Proxy, metrics: RouterMetrics) -> None:
        self.stopping = False  # True: not ready any more; requests in flight may finish
        self._fleet = fleet
        self._watchers = watchers
        self._proxy = proxy
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        own = self._own(method, path)
        if own is not None:
            await own(scope, receive, send)
        elif path in ROUTED and method == "POST":
            await self._proxy.route(scope, receive, send, await _body(receive))
        elif path.startswith(FORWARDED):
            await self._proxy.forward(scope, send, await _body(receive))
        elif path in ROUTED:
            raise ApiError(405, f"{path} does not accept {method}; use POST.")
        else:
            raise ApiError(404, f"There is no {method} {path} here: the router serves {', '.join(ROUTED)}, "
                                f"{', '.join(FORWARDED[:3])}, /health, /metrics and /replicas.")

    def _own(self, method: str, path: str) -> Response | None:
        """Return the response of one of the router's own routes; None for other paths."""
        if path == "/livez":
            return _json({"status": "alive"})
        if path in ("/health", "/ping", "/readyz"):
            ready = sum(replica.ready and not replica.draining for replica in self._fleet.replicas)
            if self.stopping or not ready:
                raise ApiError(503, "The router is stopping." if self.stopping else
                               f"None of {len(self._fleet.replicas)} servers is ready; GET /replicas says why.",
                               code="no_replica", headers={"Retry-After": "2"})
            return _json({"status": "ready", "replicas": len(self._fleet.replicas), "ready": ready})
        if path == "/version":
            return _json({"version": spillover.__version__})
        if path == "/metrics":
            return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/replicas":
            return _json({"replicas": [self._described(replica) for replica in self._fleet.replicas]})
        if (named := _NAME.fullmatch(path)) is not None:
            return self._drain(method, named[1], named[2] == "drain")
        return None

    def _drain(self, method: str, name: str, draining: bool) -> Response:
        if method != "POST":
            raise ApiError(405, "Draining takes POST.")
        replica = next((each for each in self._fleet.replicas if each.name == name), None)
        if replica is None:
            names = ", ".join(each.name for each in self._fleet.replicas)
            raise ApiError(404, f"There is no replica '{name[:128]}'; there are {names}.", code="replica_not_found")
        replica.draining = draining
        log.info("%s %s", replica.name, "gets no new requests" if draining else "gets requests again")
        return _json(self._described(replica))

    def _described(self, replica: Replica) -> dict[str, Any]:
        now, watcher = clock(), self._watchers[replica.index]
        return {"name": replica.name, "url": watcher.upstream.url, "ready": replica.ready,
                "why": replica.why or None, "draining": replica.draining, "breaker_open": replica.breaker.is_open,
                "models": sorted(replica.models), "index_state": self._fleet.state(replica).value,
                "index_note": watcher.note, "in_flight": len(replica.flights), "waiting": replica.waiting,
                "backlog_seconds": round(replica.backlog(now), 4),
                "prefill_tokens_per_second": round(1 / replica.token_seconds, 1),
                "device_blocks": replica.report.device_blocks, "device_blocks_used": replica.report.device_blocks_used}


def make_app(inner: RouterApp, settings: RouterSettings, metrics: RouterMetrics) -> ASGIApp:
    """Wrap the application in its middleware; the layer added last is the outermost."""
    app: ASGIApp = BodyLimit(inner, limit=settings.max_request_bytes)
    if settings.api_keys or settings.admin_keys:
        app = ApiKeys(app, keys=KeyRing(settings.api_keys), admin_keys=settings.admin_keys, admin_prefix="/replicas/",
                      open_paths=frozenset(("/health", "/ping", "/livez", "/readyz", "/version")))
    if not settings.api_keys:
        app = SameSite(app, host=settings.host, origins=settings.cors_origins, hosts=settings.allowed_hosts)
    app = LastResort(app)
    if settings.cors_origins:
        app = CORSMiddleware(app, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"])
    return AccessLog(app, settings.log_requests, metrics)


class AccessLog:
    """Middleware that gives each request an id, or keeps the client's, counts it, and logs a line when it finished."""

    def __init__(self, app: ASGIApp, logs: bool, metrics: RouterMetrics) -> None:
        self._app = app
        self._logs = logs
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope["request_id"] = request_id
        start, sent = time.monotonic(), Sent(send, lambda: [(b"x-request-id", request_id.encode())])
        try:
            await self._app(scope, receive, sent)
        finally:
            route: Route = scope.get("spillover.route") or Route()
            if scope["path"] in ROUTED:
                self._metrics.requests.labels(route.replica, str(sent.status)).inc()
            if self._logs and not scope["path"].startswith(_QUIET):
                fields = {"method": scope["method"], "path": scope["path"][:128].encode("unicode_escape").decode(),
                          "status": sent.status, "milliseconds": round((time.monotonic() - start) * 1e3),
                          "id": request_id, "replica": route.replica, "attempts": route.attempts}
                log.info("%s", "{method} {path} {status} {milliseconds} ms id={id} replica={replica} "
                               "attempts={attempts}".format_map(fields), extra={"fields": fields})


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client closed the connection", code="client_closed")
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
