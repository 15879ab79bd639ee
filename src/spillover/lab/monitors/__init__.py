"""Monitors that sample during every run: GPUs, cores, the engine's processes, disks, the engine's own metrics.

`Recorder(default_monitors(engine))` records them as rows of (unix time, source, metric, value); `exporter.py` exports
the same values to Prometheus and Performance Co-Pilot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spillover.lab.monitors.base import Monitor, Row
from spillover.lab.monitors.cpu import CpuMonitor
from spillover.lab.monitors.disk import DiskMonitor
from spillover.lab.monitors.nvml import NvmlMonitor
from spillover.lab.monitors.processes import ProcessMonitor
from spillover.lab.monitors.prometheus import PrometheusMonitor
from spillover.lab.monitors.recorder import Recorder, read_parquet, write_parquet

if TYPE_CHECKING:
    from spillover.lab.engines.base import Engine

__all__ = ["CpuMonitor", "DiskMonitor", "Monitor", "NvmlMonitor", "ProcessMonitor", "PrometheusMonitor", "Recorder",
           "Row", "default_monitors", "read_parquet", "write_parquet"]


def default_monitors(engine: Engine) -> list[Monitor]:
    """Return the monitors of a running engine."""
    return [NvmlMonitor(), CpuMonitor(), ProcessMonitor(engine.pids), DiskMonitor(),
            PrometheusMonitor(engine.running.url)]
