"""A monitor of the engine's processes: resident memory, unshared memory, processor time, threads.

Resident memory counts shared pages once per process; unique memory (USS) does not, but makes the kernel walk the page
tables, so it is read less often.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from spillover.lab.monitors.base import named

UNIQUE_SECONDS = 5.0


class ProcessMonitor:
    """A monitor of processes; `pids` is called at every reading, as processes start and exit."""

    source = "process"

    def __init__(self, pids: Callable[[], Sequence[int]], unique_seconds: float = UNIQUE_SECONDS) -> None:
        self._pids, self._unique_seconds = pids, unique_seconds
        self._known: dict[int, psutil.Process] = {}
        self._unique_at = float("-inf")

    def open(self) -> str | None:
        return None if self._pids() else "no processes of the engine to watch: the lab did not start it"

    def read(self) -> Mapping[str, float]:
        now = time.monotonic()
        unique = now - self._unique_at >= self._unique_seconds
        if unique:
            self._unique_at = now
        found: dict[str, float] = {}
        totals: dict[str, float] = {}
        for process in self._processes():
            try:
                values = _values(process, unique)
                name = process.name()
            except psutil.Error:  # the process has exited
                continue
            for metric, value in values.items():
                found[named(metric, pid=process.pid, name=name)] = value
                totals[metric] = totals.get(metric, 0.0) + value
        return found | totals

    def close(self) -> None:
        self._known.clear()

    def _processes(self) -> list[psutil.Process]:
        """Return the same objects as before: they store the processor time to which a percentage relates."""
        pids = self._pids()
        for gone in set(self._known) - set(pids):
            del self._known[gone]
        for pid in pids:
            if pid not in self._known:
                try:
                    self._known[pid] = psutil.Process(pid)
                except psutil.Error:
                    continue
        return list(self._known.values())


def _values(process: psutil.Process, unique: bool) -> dict[str, float]:
    with process.oneshot():
        values = {
            "rss_bytes": float(process.memory_info().rss),
            "busy_percent": float(process.cpu_percent()),  # 100 is one core
            "threads": float(process.num_threads()),
        }
    if unique:
        with contextlib.suppress(psutil.AccessDenied):
            values["uss_bytes"] = float(process.memory_full_info().uss)
    return values
