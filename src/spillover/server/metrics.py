"""What Prometheus reads at /metrics: vLLM's metric names under `spillover:`, and where prompt tokens came from.

A request is counted once, when it ends. Totals of the engine process begin at zero again when it is restarted; they are
carried over here, so that no counter ever falls.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spillover.engine.request import Request

if TYPE_CHECKING:
    from spillover.engine.output_processor import Answer

PREFIX = "spillover:"
SOURCES = ("computed", "device", "host", "disk", "remote")
FINISH_REASONS = ("stop", "length", "abort", "error")

# vLLM's layouts, so that its dashboards and recording rules keep their meaning.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                       20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
