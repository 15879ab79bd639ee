"""The HTTP application: its routes and the middleware around them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import spillover
from spillover.server.access import BodyLimit, RequestLog
from spillover.server.api import admin, chat, completions, kv_info, probes, responses
from spillover.server.api.answers.response_store import ResponseStore
from spillover.server.api.documents import describe
from spillover.server.api.errors import LastResort, add_error_handlers
from spillover.server.auth import ANONYMOUS, ApiKeys, KeyRing
from spillover.server.engine.async_llm import AsyncLLM
from spillover.server.front import Front
from spillover.server.origin import SameSite
from spillover.server.schemas.schemas_admin import (
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from spillover.server.schemas.schemas_chat import ChatRequest
from spillover.server.schemas.schemas_completions import CompletionRequest
from spillover.server.schemas.schemas_responses import ResponsesRequest
from spillover.server.settings import ServerSettings
from spillover.server.telemetry.page_routes import add_metrics, add_page
from spillover.server.telemetry.recorder import Recorder
from spillover.server.telemetry.tracing import TraceRequests, Traces

BODIES = (CompletionRequest, ChatRequest, ResponsesRequest, TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest,
          EmbeddingsRequest)


def make_app(client: AsyncLLM, settings: ServerSettings) -> FastAPI:
    app = FastAPI(title="Spillover", version=spillover.__version__, docs_url=None, redoc_url=None,
                  description="An OpenAI-compatible server for language models that do not fit.")
    keys = KeyRing(settings.api_keys, settings.api_key_file)
    recorder = Recorder(client, settings.served_model_names[0], keys.names or (ANONYMOUS,),
                        settings.metrics_prefix == "vllm")
    front = Front(client, settings, recorder)
    app.state.front, app.state.client, app.state.recorder, app.state.keys = front, client, recorder, keys
    app.state.responses = ResponseStore(settings.response_store_bytes)
    for family in (completions, chat, responses, admin, probes, kv_info):
        app.include_router(family.router)
    add_page(app)
    add_error_handlers(app)
    describe(app, BODIES)
    # The middleware added last is the outermost.
    app.add_middleware(BodyLimit, limit=settings.max_request_bytes)
    if keys or settings.admin_keys:
        app.add_middleware(ApiKeys, keys=keys, admin_keys=settings.admin_keys)
    if not keys:  # not needed with keys, as a page of another site does not know them
        app.add_middleware(SameSite, host=settings.host, origins=settings.cors_origins, hosts=settings.allowed_hosts)
    app.add_middleware(LastResort)
    add_metrics(app)  # outside of the layers above, to count their responses too
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"],
                           allow_headers=["*"])
    app.state.traces = None
    if settings.otlp_traces_endpoint is not None:
        app.state.traces = Traces(settings.otlp_traces_endpoint, client, settings.served_model_names[0],
                                  recorder.metrics.registry)
        app.add_middleware(TraceRequests, traces=app.state.traces)
    app.add_middleware(RequestLog, front=front)
    return app
