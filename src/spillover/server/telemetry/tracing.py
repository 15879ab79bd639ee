"""OpenTelemetry traces (`--otlp-traces-endpoint`): the time of each request by phase.

A request's spans are created once it has finished, from times that are recorded anyway. A separate thread sends them;
if the collector is unreachable they are dropped and counted; no request waits. Without the flag none of it is loaded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter

import spillover
from spillover.engine.requests.request import Request
from spillover.errors import SpilloverError
from spillover.server.access import Sent
from spillover.server.telemetry.tier_metrics import PREFIX

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Receive, Scope, Send

    from spillover.server.engine.async_llm import AsyncLLM

log = logging.getLogger("spillover.server")

ROOT = "llm_request"  # vLLM's name for the span of a request
LOWER_TIERS = ("host", "pool", "disk", "remote")
MAX_SEQUENCES = 16  # maximum number of sequences of one HTTP request that get their own spans
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}


def traces_endpoint(url: str) -> str:
    """Return the URL to post spans to; raise SpilloverError if it is invalid or OpenTelemetry is not installed."""
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong:
        raise SpilloverError(f"--otlp-traces-endpoint is the URL of a collector that takes OTLP over HTTP, as in "
                             f"http://127.0.0.1:4318/v1/traces; got '{url}'")
    try:
        there = find_spec("opentelemetry.sdk.trace") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        there = None
    if there is None:
        raise SpilloverError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'spillover[otel]'")
    return url if parts.path not in ("", "/") else url.rstrip("/") + "/v1/traces"


@dataclass(frozen=True)
class Phase:
    """A part of a sequence's time, in monotonic seconds."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Phase, ...] = ()


def phases(request: Request, block_size: int, slot_bytes: int) -> Iterator[Phase]:
    """Yield queue, restore, prefill and decode of a sequence, in this order, as far as it came.

    `slot_bytes` is the size of a block below the device. Computation while KV is being loaded counts as restore.
    """
    if not request.scheduled:  # set with the first token
        return
    times, first = request.timings, request.first_token or request.finished
    yield Phase("queue", request.arrived, request.scheduled)
    restored = request.scheduled
    parts = []
    for tier in LOWER_TIERS:
        tokens = getattr(request.sources, tier, 0)
        if tokens:
            nbytes = -(-tokens // block_size) * slot_bytes if block_size else 0
            parts.append((tier, tokens, nbytes))
    if parts or times.restore > 0:
        start = request.restore_started if times.restore > 0 else request.scheduled
        restored = start + times.restore
        total = sum(nbytes for *_, nbytes in parts)
        yield Phase("restore", start, restored, _moved(sum(tokens for _, tokens, _ in parts), total, times.restore),
                    tuple(Phase("transfer", start, restored,
                                {"spillover.tier": tier} | _moved(tokens, nbytes, times.restore))
                          for tier, tokens, nbytes in parts))
    computed = request.sources.computed if request.sources is not None else 0
    yield Phase("prefill", restored, max(restored, first), {"spillover.tokens": computed})
    if request.first_token and request.finished:
        yield Phase("decode", request.first_token, max(request.first_token, request.finished),
                    {"spillover.tokens": len(request.token_ids) - request.num_prompt,
                     "spillover.preemptions": request.num_preemptions})


class Traces:
    """The spans of a server's requests, and the connection to their collector."""

    def __init__(self, endpoint: str, client: AsyncLLM, model_name: str, registry: CollectorRegistry) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._client, self._model = client, model_name
        facts = {"service.version": spillover.__version__}
        if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "") \
                and not os.environ.get("OTEL_SERVICE_NAME"):
            facts["service.name"] = "spillover"
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        sent = Counter(PREFIX + "trace_spans", "Spans sent to the collector, and spans lost because it did not answer.",
                       ["result"], registry=registry)
        exporter: Any = _Exporter(endpoint, sent)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("spillover", spillover.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span:
        """Start the span of an HTTP request, below the caller's if it sent a traceparent."""
        from opentelemetry.trace import SpanKind

        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]
                   if name in (b"traceparent", b"tracestate")}
        span: Span = self._tracer.start_span(ROOT, self._propagator.extract(carrier), SpanKind.SERVER, {
            "http.request.method": scope["method"], "url.path": scope["path"][:128],
            "gen_ai.request.id": scope.get("request_id", ""), "gen_ai.response.model": self._model,
            "gen_ai.operation.name": _OPERATIONS.get(scope["path"], "unknown")})
        return span

    def end(self, span: Span, scope: Scope, status: int) -> None:
        """Set the attributes and phases of the request's span and end it; another thread sends them later."""
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("http.response.status_code", status)
        if status >= 499:  # a server error, or the client did not wait for the response
            span.set_status(Status(StatusCode.ERROR))
        requests = [request for job in scope.get("spillover.jobs") or () for request in job.requests]
        if span.is_recording() and requests:
            span.set_attributes(_described(requests))
            plan = self._client.info.plan
            offset = time.time() - time.monotonic()
            for index, request in enumerate(requests[:MAX_SEQUENCES]):
                for phase in phases(request, plan.block_size, plan.slot_bytes):
                    self._add(span, phase, offset, {"spillover.sequence": index} if len(requests) > 1 else {})
        span.end()

    def close(self, seconds: float) -> None:
        """Send the remaining spans, waiting at most `seconds`."""
        last = threading.Thread(target=self._provider.shutdown, name="spillover-traces", daemon=True)
        last.start()
        last.join(seconds)

    def _add(self, parent: Span, phase: Phase, offset: float, more: dict[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(phase.name, set_span_in_context(parent), attributes=phase.attributes | more,
                                       start_time=int((phase.start + offset) * 1e9))
        for part in phase.parts:
            self._add(span, part, offset, more)
        span.end(int((phase.end + offset) * 1e9))


class TraceRequests:
    """Middleware that creates a span for each request to /v1, and adds its traceparent to the response."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        span = self._traces.begin(scope)
        context = span.get_span_context()
        answered = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        sent = Sent(send, lambda: [(b"traceparent", answered.encode())])
        try:
            await self._app(scope, receive, sent)
        finally:
            try:
                self._traces.end(span, scope, sent.status)
            except Exception:  # a failed trace must not fail the response
                log.exception("A request could not be traced")


class _Exporter:
    """An exporter that logs only when the collector becomes unreachable and when it is back, not every attempt."""

    def __init__(self, endpoint: str, sent: Counter) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._exporter: Any = OTLPSpanExporter(endpoint)
        self._endpoint, self._sent = endpoint, sent
        self._unreachable = False
        for result in ("sent", "lost"):
            sent.labels(result)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log every failed attempt

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result: SpanExportResult = self._exporter.export(spans)
        taken = result.name == "SUCCESS"
        self._sent.labels("sent" if taken else "lost").inc(len(spans))
        if self._unreachable == taken:
            self._unreachable = not taken
            if taken:
                log.info("The trace collector at %s accepts traces again", self._endpoint)
            else:
                log.warning("The trace collector at %s accepts no traces; they are dropped until it does",
                            self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True  # nothing is buffered here


def _moved(tokens: int, nbytes: int, seconds: float) -> dict[str, Any]:
    rate = {"spillover.bytes_per_second": nbytes / seconds} if seconds > 0 else {}
    return {"spillover.tokens": tokens, "spillover.bytes": nbytes} | rate


def _described(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the attributes of a request's span, with vLLM's names and those of OpenTelemetry's conventions."""
    first, params = requests[0], requests[0].params
    prompt = sum(request.num_prompt for request in requests if request.parent is None)
    output = sum(len(request.token_ids) - request.num_prompt for request in requests)
    described: dict[str, Any] = {
        "gen_ai.request.n": params.n, "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": output,
        "gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output,
        "gen_ai.response.finish_reasons": [request.finish_reason or "abort" for request in requests[:MAX_SEQUENCES]]}
    if params.max_tokens is not None:
        described["gen_ai.request.max_tokens"] = params.max_tokens
    if first.sources is not None:
        described |= {f"spillover.prompt_tokens.{source}": getattr(first.sources, source)
                      for source in ("computed", "device", *LOWER_TIERS)}
    if first.first_token:
        times = first.timings
        described |= {"gen_ai.latency.time_in_queue": times.queue,
                      "gen_ai.latency.time_to_first_token": first.first_token - first.arrived,
                      "gen_ai.latency.time_in_model_prefill": times.prefill}
        if first.finished:
            described |= {"gen_ai.latency.e2e": first.finished - first.arrived,
                          "gen_ai.latency.time_in_model_decode": times.decode,
                          "gen_ai.latency.time_in_model_inference": first.finished - first.scheduled}
    return described
