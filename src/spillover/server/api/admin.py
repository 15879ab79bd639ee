"""Routes for models, tokenizing and usage, and the admin routes of a running server."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import spillover
from spillover.server.api.answers.sse import encode
from spillover.server.api.documents import body_of, refusals
from spillover.server.api.errors import ApiError
from spillover.server.api.requests.conversation import prompt_ids
from spillover.server.api.requests.json_body import JsonBody
from spillover.server.front import Front, front_of, prepare
from spillover.server.schemas.schemas_admin import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingsRequest,
    HealthResponse,
    ModelCard,
    ModelList,
    ProfileResponse,
    SleepingResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
    UsageResponse,
    VersionResponse,
)

router = APIRouter()


class _TokenizeBody(JsonBody[Any]):
    def __init__(self) -> None:
        super().__init__(TokenizeTextRequest)

    def model_for(self, value: dict[str, Any]) -> type[TokenizeTextRequest] | type[TokenizeChatRequest]:
        return TokenizeChatRequest if "messages" in value else TokenizeTextRequest


_GUARDED = refusals(statuses=(401, 403, 500, 503))
_PROFILED = refusals(statuses=(400, 401, 403, 404, 500, 503))


@router.get("/v1/models", response_model=ModelList, responses=refusals(statuses=(401, 500)))
async def models(http: HttpRequest) -> Response:
    front = front_of(http)
    return _json({"object": "list", "data": [_card(front, name) for name in front.settings.served_model_names]})


@router.get("/v1/models/{model:path}", response_model=ModelCard, responses=refusals(statuses=(401, 404, 500)))
async def model(http: HttpRequest, model: str) -> Response:
    front = front_of(http)
    return _json(_card(front, front.model_name(model)))


@router.post("/v1/embeddings", status_code=404, responses=refusals(statuses=(401, 404)),
             openapi_extra=body_of(EmbeddingsRequest))
async def embeddings(http: HttpRequest) -> Response:
    name = front_of(http).settings.served_model_names[0]
    raise ApiError(404, f"'{name}' is a text generation model: it makes no embeddings. This server has "
                        f"/v1/completions, /v1/chat/completions and /v1/responses.", code="unsupported")


@router.post("/tokenize", response_model=TokenizeResponse,
             responses=refusals(statuses=(400, 401, 404, 413, 415, 500, 503)),
             openapi_extra=body_of(TokenizeTextRequest, TokenizeChatRequest))
async def tokenize(http: HttpRequest,
                   body: Annotated[TokenizeTextRequest | TokenizeChatRequest, Depends(_TokenizeBody().read)],
                   ) -> Response:
    front = front_of(http)
    front.model_name(body.model)
    front.require_engine()
    renders = isinstance(body, TokenizeChatRequest)
    return Response(await prepare(http, lambda: _tokenized(front, body), renders), media_type="application/json")


def _tokenized(front: Front, body: TokenizeTextRequest | TokenizeChatRequest) -> bytes:
    if isinstance(body, TokenizeTextRequest):
        ids = front.tokenizer.encode(body.prompt, body.add_special_tokens)
    else:
        ids = prompt_ids(front, body, body.tools or ())
    strings = [front.texts.name(token) for token in ids] if body.return_token_strs else None
    return encode({"count": len(ids), "max_model_len": front.client.info.max_model_len, "tokens": ids,
                   "token_strs": strings})


@router.post("/detokenize", response_model=DetokenizeResponse,
             responses=refusals(statuses=(400, 401, 404, 413, 415, 500, 503)), openapi_extra=body_of(DetokenizeRequest))
async def detokenize(http: HttpRequest,
                     body: Annotated[DetokenizeRequest, Depends(JsonBody(DetokenizeRequest).read)]) -> Response:
    front = front_of(http)
    front.model_name(body.model)
    front.require_engine()
    vocabulary = front.client.info.model_config.vocab_size
    bad = next((token for token in body.tokens if token >= vocabulary), None)
    if bad is not None:
        raise ApiError(400, f"token id {bad} is out of range: this model has 0 to {vocabulary - 1}", "tokens")
    text = await prepare(http, lambda: front.tokenizer.decode(body.tokens, False))
    return _json({"prompt": text})


@router.get("/usage", response_model=UsageResponse, responses=refusals(statuses=(401, 403, 500)))
async def usage(http: HttpRequest) -> Response:
    """Return the totals of the request's API key since the server's start; for an admin key, those of all keys."""
    front = front_of(http)
    alone = None if http.scope.get("spillover.admin") else http.scope.get("spillover.key")
    return _json({"since": front.started, "keys": front.recorder.usage.report(alone)})


@router.get("/version", response_model=VersionResponse, responses=refusals(statuses=(500,)))
async def version() -> Response:
    return _json({"version": spillover.__version__})


@router.post("/reset_prefix_cache", response_model=HealthResponse, responses=_GUARDED)
async def reset_prefix_cache(http: HttpRequest) -> Response:
    await _admin(http).client.call("reset_prefix_cache")
    return _json({"status": "ok"})


@router.post("/sleep", response_model=SleepingResponse, responses=refusals(statuses=(400, 401, 403, 500, 503)))
async def sleep(http: HttpRequest, level: Annotated[int, Query(ge=1, le=1)] = 1) -> Response:
    """Move the weights to the host, keeping the KV cache. Requests wait until /wake_up."""
    front = _admin(http)
    await front.client.call("sleep")
    return _json({"is_sleeping": front.client.is_sleeping})


@router.post("/wake_up", response_model=SleepingResponse, responses=_GUARDED)
async def wake_up(http: HttpRequest) -> Response:
    front = _admin(http)
    await front.client.call("wake_up")
    return _json({"is_sleeping": front.client.is_sleeping})


@router.get("/is_sleeping", response_model=SleepingResponse, responses=_GUARDED)
async def is_sleeping(http: HttpRequest) -> Response:
    return _json({"is_sleeping": front_of(http).client.is_sleeping})


@router.post("/start_profile", response_model=HealthResponse, responses=_PROFILED)
async def start_profile(http: HttpRequest) -> Response:
    """Profile the engine's steps from now on, until /stop_profile or for 100 steps."""
    folder = _profiler_dir(http)
    await _running(http).client.ask("start_profile", folder)
    return _json({"status": "ok"})


@router.post("/stop_profile", response_model=ProfileResponse, responses=_PROFILED)
async def stop_profile(http: HttpRequest) -> Response:
    """Stop the profile and write its trace, which https://ui.perfetto.dev opens, to --profiler-dir."""
    _profiler_dir(http)
    return _json(await _running(http).client.ask("stop_profile"))


def _profiler_dir(http: HttpRequest) -> str:
    folder = front_of(http).settings.profiler_dir
    if folder is None:
        raise ApiError(404, "Profiling is off: start the server with --profiler-dir DIR, a folder for the traces.",
                       code="unsupported")
    return folder


def _admin(http: HttpRequest) -> Front:
    """Return the front; raise an ApiError unless the admin routes are enabled and the engine is ready."""
    front = front_of(http)
    if not front.settings.admin_routes:
        raise ApiError(403, f"POST {http.url.path} is off: start the server with --enable-admin-routes, or with "
                            f"--admin-api-key KEY for a key of its own.", code="admin_routes_off")
    return _running(http)


def _running(http: HttpRequest) -> Front:
    front = front_of(http)
    front.require_engine()
    return front


def _card(front: Front, name: str) -> dict[str, Any]:
    known = front.client.ready
    return {"id": name, "object": "model", "created": front.started, "owned_by": "spillover",
            "root": front.settings.served_model_names[0], "parent": None,
            "max_model_len": front.client.info.max_model_len if known else None,
            "vocab_size": front.client.info.model_config.vocab_size if known else None, "permission": []}


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
