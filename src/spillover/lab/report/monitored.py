"""Values recorded by monitors during a run, as lines to draw: memory first, then the others."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import SpilloverError


@dataclass(frozen=True)
class Choice:
    name: str
    label: str
    unit: str
    points: tuple[tuple[float, float], ...]  # (seconds since the load began, value)


@dataclass(frozen=True)
class Drawn:
    """The recorded metrics that make one line. Several sources (processes, cores, cards) are added or averaged."""

    pattern: str  # regular expression for "source/metric"
    name: str
    unit: str
    average: bool = False
    factor: float = 1.0


LABELS = r"(\{.*\})?"
DRAWN = (
    Drawn(r"process/rss_bytes", "resident memory", "B"),
    Drawn(r"process/uss_bytes", "private memory (USS)", "B"),
    Drawn(rf"gpu/memory_used_bytes{LABELS}", "GPU memory", "B"),
    Drawn(r'engine/.*:tier_bytes\{.*tier="device".*use="kv".*\}', "KV on the device", "B"),
    Drawn(r'engine/.*:tier_bytes\{.*tier="host".*use="kv".*\}', "KV in host memory", "B"),
    Drawn(r'engine/.*:kv_cache_usage_perc(\{(?!.*tier="(?!device)).*\})?', "KV cache in use", "%", average=True),
    Drawn(rf"engine/.*:num_requests_running{LABELS}", "requests running", ""),
    Drawn(rf"engine/.*:num_requests_waiting{LABELS}", "requests waiting", ""),
    Drawn(r"cpu/busy_percent", "CPU busy", "%", factor=0.01),
    Drawn(r"cpu/memory_used_bytes", "memory in use on the machine", "B"),
    Drawn(rf"gpu/utilization_percent{LABELS}", "GPU busy", "%", average=True, factor=0.01),
    Drawn(rf"gpu/power_watts{LABELS}", "GPU power", "W"),
    Drawn(rf"gpu/pcie_rx_bytes_per_second{LABELS}", "PCIe to the GPU", "B/s"),
    Drawn(rf"gpu/pcie_tx_bytes_per_second{LABELS}", "PCIe from the GPU", "B/s"),
    Drawn(r"disk/read_bytes_per_second", "disk read", "B/s"),
    Drawn(r"disk/written_bytes_per_second", "disk written", "B/s"),
)


def choices(path: Path, start: float) -> list[Choice]:
    """Return the recorded lines of a Parquet file with time (unix), source, metric and value."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SpilloverError("reading recorded values needs the lab extra: pip install 'spillover[lab]'") from error
    table = pq.read_table(path, columns=["time", "source", "metric", "value"])
    columns = (table.column(name).to_pylist() for name in ("time", "source", "metric", "value"))
    series: dict[Drawn, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    known: dict[str, Drawn | None] = {}
    for at, source, metric, value in zip(*columns, strict=True):
        name = f"{source}/{metric}"
        if name not in known:
            known[name] = next((drawn for drawn in DRAWN if re.fullmatch(drawn.pattern, name)), None)
        drawn = known[name]
        if drawn is not None and value is not None and value == value:
            series[drawn][at].append(value)
    return [_choice(drawn, series[drawn], start) for drawn in DRAWN if series.get(drawn)]  # in the order of DRAWN


def _choice(drawn: Drawn, samples: dict[float, list[float]], start: float) -> Choice:
    points = [(at - start, drawn.factor * (sum(values) / len(values) if drawn.average else sum(values)))
              for at, values in sorted(samples.items())]
    return Choice(drawn.name, drawn.name, drawn.unit, tuple(points))
