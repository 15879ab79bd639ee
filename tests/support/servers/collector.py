"""A collector of OpenTelemetry traces: receives OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Span:
    """A span as received; times in seconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    is_error: bool


class Collector:
    """A server on a free port, in a thread; a context manager that starts and stops it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        spans, resources = self.spans, self.resources

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = ExportTraceServiceRequest()
                message.ParseFromString(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                for group in message.resource_spans:
                    resources.append(_plain(group.resource.attributes))
                    spans.extend(_span(span) for scope in group.scope_spans for span in scope.spans)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]


def _span(span: Any) -> Span:
    return Span(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9, _plain(span.attributes),
                span.status.code == 2)


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
