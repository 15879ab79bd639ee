"""Sample numbers of one made-up run."""

from __future__ import annotations

from typing import Any

from spillover.bench.records import Run
from spillover.lab.validity import Sample
from support.lab.fake_lab import make_run

METRICS = ("output_throughput", "median_ttft_ms")


def sample(run: Run | None = None, **changes: Any) -> Sample:
    return Sample(**{"run": run or make_run(), "warmups": 2, "metrics": METRICS, "sharing": 0.0, "working_set": 4000,
                     "pool": 1000, "offload": True, **changes})
