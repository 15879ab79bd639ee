"""The monitors as a page that Prometheus scrapes, and that Performance Co-Pilot's openmetrics PMDA reads.

Names are `spillover_lab_` + source + metric; the engine's own metrics keep theirs. Monitors are read on each request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spillover.lab.engines.metrics_text import bare, labels_of
from spillover.lab.monitors.base import Monitor

PREFIX = "spillover_lab_"
# The PMDA names the source after this file, and reads it again at every fetch.
PCP_CONFIG = "/var/lib/pcp/pmdas/openmetrics/config.d/spillover.url"


class Exporter:
    """A Prometheus page: `with Exporter(monitors, port) as exporter: exporter.wait()`; port 0 picks a free one."""

    def __init__(self, monitors: Sequence[Monitor], port: int, host: str = "127.0.0.1") -> None:
        self.notes = []
        self._monitors = []
        for monitor in monitors:
            why = monitor.open()
            if why is None:
                self._monitors.append(monitor)
            else:
                self.notes.append(why)
        self._lock = threading.Lock()  # held while monitors are read
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for monitor in self._monitors:
            monitor.close()

    def wait(self) -> None:
        """Wait until Ctrl-C."""
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            readings = [(monitor.source, _read(monitor)) for monitor in self._monitors]
        for source, values in readings:
            yield from _families(source, values)


def pcp_instructions(url: str) -> str:
    """Return the commands with which Performance Co-Pilot records this page."""
    return (f"echo '{url}' | sudo tee {PCP_CONFIG}\n"
            "(cd /var/lib/pcp/pmdas/openmetrics && sudo ./Install)   # once\n"
            "pminfo -f openmetrics.spillover")


def _read(monitor: Monitor) -> dict[str, float]:
    try:
        return dict(monitor.read())
    except Exception:  # a page without one source is better than no page
        return {}


def _families(source: str, values: dict[str, float]) -> Iterator[Metric]:
    """Yield the samples grouped by name, as the format requires."""
    by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for key, value in values.items():
        name = bare(key) if source == "engine" else f"{PREFIX}{source}_{bare(key)}"
        by_name.setdefault(name, []).append((labels_of(key), value))
    for name, samples in by_name.items():
        counts = name.endswith("_total")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        parts = [sample for sample in samples if sample[0]] or samples  # a sum can be computed from its parts
        labels = list(parts[0][0])
        family = kind(name.removesuffix("_total"), f"{source}: {bare(name)}", labels=labels)
        for found, value in parts:
            family.add_metric([found.get(label, "") for label in labels], value)
        yield family
