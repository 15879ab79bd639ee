"""A monitor of reads and writes per disk."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from spillover.lab.monitors.base import Rates, named


class DiskMonitor:
    """A monitor of whole disks: the traffic of partitions is included in their disk's."""

    source = "disk"

    def __init__(self) -> None:
        self._rates = Rates()

    def open(self) -> str | None:
        if not _counters():
            return "this system does not report the traffic of its disks"
        self.read()
        return None

    def read(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for disk, totals in _counters().items():
            for metric, total in totals.items():
                name = named(metric, disk=disk)
                rate = self._rates.per_second(name, total)
                if rate is not None:
                    found[name] = rate
        sums: dict[str, float] = {}
        for name, rate in found.items():
            metric = name.partition("{")[0]
            sums[metric] = sums.get(metric, 0.0) + rate
        return found | sums

    def close(self) -> None:
        pass


def _counters() -> dict[str, dict[str, float]]:
    try:
        disks = psutil.disk_io_counters(perdisk=True) or {}
    except (OSError, RuntimeError, NotImplementedError):
        return {}
    names = [name for name in disks if not name.startswith(("loop", "ram", "zram", "dm-", "md"))]
    whole = [name for name in names if not any(name != other and name.startswith(other) for other in names)]
    return {name: {"read_bytes_per_second": float(disks[name].read_bytes),
                   "written_bytes_per_second": float(disks[name].write_bytes),
                   "reads_per_second": float(disks[name].read_count),
                   "writes_per_second": float(disks[name].write_count)} for name in whole}
