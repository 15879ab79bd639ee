"""Reading of several monitors at a steady rate during a run, all on one clock.

Each monitor has its own thread, so that a slow one (a busy server's /metrics) does not delay the others, and is read at
absolute times, so that rates do not drift. Times are unix seconds based on one reading of the wall clock: adjusting the
clock during a run does not shift the rows.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from spillover.errors import SpilloverError
from spillover.lab.monitors.base import Monitor, Row


class Recorder:
    """A recorder: `with Recorder(monitors, hz=2) as recorder: ...`, then `rows`, `notes`, `write_parquet(path)`."""

    def __init__(self, monitors: Sequence[Monitor], hz: float = 2.0) -> None:
        if not 0 < hz <= 50:
            raise SpilloverError(f"monitors are read at most 50 times a second; got {hz}")
        self.notes: list[str] = []  # what could not be monitored, without duplicates
        self._monitors, self._period = tuple(monitors), 1.0 / hz
        self._rows: dict[str, list[Row]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._open: list[Monitor] = []
        self._unix_zero = 0.0

    def __enter__(self) -> Self:
        self._unix_zero = time.time() - time.perf_counter()
        for monitor in self._monitors:
            why = monitor.open()
            if why is None:
                self._open.append(monitor)
            else:
                self._note(why)
        for monitor in self._open:
            self._rows.setdefault(monitor.source, [])
            self._read(monitor)  # a first reading before the run
        second = time.perf_counter() + self._period
        for monitor in self._open:
            thread = threading.Thread(target=self._watch, args=(monitor, second), name=f"monitor-{monitor.source}",
                                      daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for monitor in self._open:
            self._read(monitor)  # a last reading includes everything up to the end
            monitor.close()
        self._open = []

    @property
    def rows(self) -> list[Row]:
        with self._lock:
            return sorted(row for rows in self._rows.values() for row in rows)

    def write_parquet(self, path: Path) -> Path:
        """Write the rows as time, source, metric, value; atomically."""
        return write_parquet(self.rows, path)

    def _watch(self, monitor: Monitor, due: float) -> None:
        while not self._stop.wait(max(0.0, due - time.perf_counter())):
            self._read(monitor)
            # A reading that took longer than the period skips times instead of catching up.
            due += self._period * max(1, math.ceil((time.perf_counter() - due) / self._period))

    def _read(self, monitor: Monitor) -> None:
        at = time.perf_counter()
        try:
            found = monitor.read()
        except Exception as error:  # a monitor must never fail the run
            self._note(f"{monitor.source} could not be read: {type(error).__name__}: {error}")
            return
        unix = self._unix_zero + at
        with self._lock:
            self._rows[monitor.source] += [Row(unix, monitor.source, metric, value) for metric, value in found.items()
                                           if math.isfinite(value)]

    def _note(self, text: str) -> None:
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)


def write_parquet(rows: Sequence[Row], path: Path) -> Path:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SpilloverError("Parquet files need the lab extra: pip install 'spillover[lab]'") from error
    table = pyarrow.table({
        "time": pyarrow.array([row.time for row in rows], pyarrow.float64()),
        "source": pyarrow.array([row.source for row in rows], pyarrow.string()).dictionary_encode(),
        "metric": pyarrow.array([row.metric for row in rows], pyarrow.string()).dictionary_encode(),
        "value": pyarrow.array([row.value for row in rows], pyarrow.float64()),
    })
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    pyarrow.parquet.write_table(table, part, compression="zstd")
    os.replace(part, path)
    return path


def read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SpilloverError("Parquet files need the lab extra: pip install 'spillover[lab]'") from error
    columns = pyarrow.parquet.read_table(path).to_pydict()
    return [Row(*values) for values in zip(columns["time"], columns["source"], columns["metric"], columns["value"],
                                           strict=True)]
