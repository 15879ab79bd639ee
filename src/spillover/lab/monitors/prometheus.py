"""A monitor of the engine's own metrics at /metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from spillover.lab.engines.metrics_text import bare, parse_metrics


class PrometheusMonitor:
    """All samples of the page except histogram buckets; the totals of histograms are kept."""

    source = "engine"

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        """Monitor a server. `url`: its address, without /metrics."""
        self._url, self._timeout = url.rstrip("/") + "/metrics", timeout

    def open(self) -> str | None:
        try:
            return None if self.read() else f"{self._url} is empty"
        except (OSError, ValueError) as error:
            return f"no metrics of the engine: {self._url}: {error}"

    def read(self) -> Mapping[str, float]:
        with urllib.request.urlopen(self._url, timeout=self._timeout) as answer:
            text = answer.read().decode(errors="replace")
        return {key: value for key, value in parse_metrics(text).items() if not bare(key).endswith(("_bucket",
                                                                                                     "_created"))}

    def close(self) -> None:
        pass
