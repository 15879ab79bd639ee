"""Probes for load balancers and supervisors: alive, started, ready. Each answers 200 or 503 without waiting."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from spillover.server.api.answers.sse import encode
from spillover.server.api.documents import refusals
from spillover.server.api.errors import ApiError
from spillover.server.front import front_of
from spillover.server.schemas.schemas_admin import HealthResponse

PROBES = ("/health", "/ping", "/ready", "/readyz", "/livez", "/startupz")  # need no key: load balancers have none

router = APIRouter()

_STATUSES = refusals(statuses=(500, 503))


@router.get("/health", response_model=HealthResponse, responses=_STATUSES)
@router.get("/ready", response_model=HealthResponse, responses=_STATUSES)
@router.get("/readyz", response_model=HealthResponse, responses=_STATUSES)
@router.get("/ping", response_model=HealthResponse, responses=_STATUSES)
@router.post("/ping", response_model=HealthResponse, responses=_STATUSES)
async def ready(http: HttpRequest) -> Response:
    """Answer 200 while a request that is sent now would be served: not while loading, asleep, hung or draining."""
    front = front_of(http)
    if front.draining:
        raise ApiError(503, "The server is stopping: send requests elsewhere.", code="draining")
    front.require_engine()
    if front.client.is_sleeping:
        raise ApiError(503, "The engine sleeps: requests wait until POST /wake_up.", code="engine_sleeping")
    return _status(front.client.engine_state)


@router.get("/livez", response_model=HealthResponse, responses=_STATUSES)
async def live(http: HttpRequest) -> Response:
    """Answer 200 unless only a restart of the whole server can help: the engine is dead and is not restarted.

    Loading, long steps, and a sleeping, hung or dying engine still count as alive, as the server handles them itself.
    """
    front = front_of(http)
    if front.client.gave_up and not front.draining:
        raise ApiError(503, f"The engine has failed for good: {front.client.trouble}.", code="engine_unavailable")
    return _status("alive")


@router.get("/startupz", response_model=HealthResponse, responses=_STATUSES)
async def started(http: HttpRequest) -> Response:
    """Answer 200 once the model has been loaded for the first time."""
    front = front_of(http)
    if not front.started_once:
        front.require_engine()
    return _status("started")


def _status(word: str) -> Response:
    return Response(encode({"status": word}), media_type="application/json")
