"""The page at `/`, its files, the numbers it polls at `/live`, and Prometheus' `/metrics`.

All files of the page are in this package: nothing is fetched from elsewhere, and the page's headers forbid it.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from spillover.server.access import Sent
from spillover.server.api.errors import REFUSALS
from spillover.server.auth import ANONYMOUS
from spillover.server.telemetry.recorder import CLIENT_LEFT

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.types import ASGIApp, Receive, Scope, Send

    from spillover.server.telemetry.recorder import Recorder

MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add `/`, `/docs`, `/page/*` and `/live`; needs app.state.recorder."""
    files = {file.name: file.read_bytes() for file in resources.files("spillover.server").joinpath("page").iterdir()
             if "." + file.name.rpartition(".")[2] in MEDIA_TYPES}

    def respond(name: str) -> Response:
        return Response(files[name], media_type=MEDIA_TYPES["." + name.rpartition(".")[2]], headers=PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return respond("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return respond("docs.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return respond(name)

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        recorder: Recorder = app.state.recorder
        return Response(msgspec.json.encode(recorder.live()), media_type="application/json",
                        headers={"Cache-Control": "no-store"})


def add_metrics(app: FastAPI) -> None:
    """Add `/metrics`, and middleware around all layers added before that counts HTTP requests and the usage of keys.

    Needs app.state.recorder and app.state.front.
    """

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        recorder: Recorder = app.state.recorder
        return Response(recorder.scrape(app.state.front.draining), media_type=CONTENT_TYPE_LATEST)

    app.add_middleware(CountRequests, state=app.state)


class CountRequests:
    """Middleware that counts by declared route, so that no path made up by a client becomes a label."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Sent(send)
        try:
            await self._app(scope, receive, sent)
        except Exception:
            sent.status = 500 if sent.status == CLIENT_LEFT else sent.status
            raise
        finally:
            recorder: Recorder = self._state.recorder
            recorder.count_http(getattr(scope.get("route"), "path", "unknown"), sent.status)
            if scope.get("spillover.refusal") in REFUSALS:
                recorder.count_refusal(scope["spillover.refusal"])
            if scope.get("spillover.jobs"):
                recorder.usage.add(scope.get("spillover.key", ANONYMOUS),
                                   [job.requests for job in scope["spillover.jobs"]])
