"""A monitor of the machine: the load of each core and the free memory."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from spillover.lab.monitors.base import named


class CpuMonitor:
    source = "cpu"

    def open(self) -> str | None:
        psutil.cpu_percent(percpu=True)  # the first call only sets the reference point
        return None

    def read(self) -> Mapping[str, float]:
        cores = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        found = {named("busy_percent", core=core): float(busy) for core, busy in enumerate(cores)}
        return found | {
            "busy_percent": sum(cores) / len(cores),
            "load_1min": psutil.getloadavg()[0],
            "memory_used_bytes": float(memory.total - memory.available),
            "memory_available_bytes": float(memory.available),
        }

    def close(self) -> None:
        pass
