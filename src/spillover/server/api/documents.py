"""The OpenAPI document: json_body parses request bodies without FastAPI, so they are described here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from spillover.server.schemas.schemas_common import ErrorResponse

_REF = "#/components/schemas/{model}"
STREAMED: dict[int | str, Any] = {
    200: {"description": "The answer; with stream, server-sent events.",
          "content": {"text/event-stream": {}}}}
_WORDS = {400: "The request cannot be served as it was sent.", 401: "An API key is needed.",
          403: "Refused for this origin or host, or the route is off.", 404: "No such model.",
          413: "The body is too large.", 415: "The body is not application/json.",
          429: "Too many requests are waiting; see Retry-After.", 500: "A fault in the server.",
          503: "The engine is not ready."}


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` of a route whose body is one of these models; pass the models to `describe` too."""
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def refusals(extra: dict[int | str, Any] | None = None,
             statuses: tuple[int, ...] = (400, 401, 403, 404, 413, 415, 429, 500, 503)) -> dict[int | str, Any]:
    described: dict[int | str, Any] = {status: {"model": ErrorResponse, "description": _WORDS[status]}
                                       for status in statuses}
    return described | (extra or {})


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of the bodies to the document's components."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
