"""The monitors as a page that Prometheus scrapes, and that Performance Co-Pilot's openmetrics PMDA reads.

Names are `spillover_lab_` + source + metric; the engine's own metrics keep theirs. Monitors are read when somebody
asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from spillover.lab.engines.metrics_text import bare, labels_of
from spillover.lab.monitors.base import Monitor

PREFIX = "spillover_lab_"
# The PMDA's name for the source is that of the file; it reads it again every time it is asked.
PCP_CONFIG = "/var/lib/pcp/pmdas/openmetrics/config.d/spillover.url"


class Exporter:
    """`with Exporter(monitors, port) as exporter: exporter.wait()`; port 0 takes a free one."""

    def __init__(self, monitors: Sequence[Monitor], port: int, host: str = "127.0.0.1") -> None:
        self.notes = []
        self._monitors = []
        for monitor in monitors:
            why = monitor.open()
            if why is None:
                self._monitors.append(monitor)
            else:
                self.notes.append(why)
        self._lock = threading.Lock()  # a monitor is read by one at a time
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(self))
        self._server = ThreadingHTTPServer((host, port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        for monitor in self._monitors:
            monitor.close()

    def wait(self) -> None:
        """Until Ctrl-C."""
        self._thread.join()

    def families(self) -> Iterator[Metric]:
        with self._lock:
            readings = [(monitor.source, _read(monitor)) for monitor in self._monitors]
        for source, values in readings:
            yield from _families(source, values)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry = self._registry

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                body = encode(registry)
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Page


class _Readings(Collector):
    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        return self._exporter.families()

    def describe(self) -> list[Metric]:
        return []  # so that registering it reads nothing


def pcp_instructions(url: str) -> str:
    """What a person types to have Performance Co-Pilot record this page."""
    return (f"echo '{url}' | sudo tee {PCP_CONFIG}\n"
            "(cd /var/lib/pcp/pmdas/openmetrics && sudo ./Install)   # once\n"
            "pminfo -f openmetrics.spillover")


def _read(monitor: Monitor) -> dict[str, float]:
    try:
        return dict(monitor.read())
    except Exception:  # a page without one source is better than no page
        return {}


def _families(source: str, values: dict[str, float]) -> Iterator[Metric]:
    """Samples of one name together, as the format wants them."""
    by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for key, value in values.items():
        name = bare(key) if source == "engine" else f"{PREFIX}{source}_{bare(key)}"
        by_name.setdefault(name, []).append((dict(labels_of(key)), value))
    for name, samples in by_name.items():
        counts = name.endswith("_total")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        parts = [sample for sample in samples if sample[0]] or samples  # a sum can be had from its parts
        labels = list(parts[0][0])
        family = kind(name.removesuffix("_total"), f"{source}: {bare(name)}", labels=labels)
        for found, value in parts:
            family.add_metric([found.get(label, "") for label in labels], value)
        yield family
