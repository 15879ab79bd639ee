"""Monitors during one visit, recorded in a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spillover.lab.engines import Engine
from spillover.lab.monitors import Recorder, default_monitors

HZ = 2.0


class Monitored:
    """Monitors during a run: `with watch(engine, path):`. Each problem is reported once."""

    def __init__(self, report: Callable[[str], None] = lambda note: None, hz: float = HZ) -> None:
        self._report, self._hz = report, hz
        self._reported: set[str] = set()

    @contextmanager
    def __call__(self, engine: Engine, path: Path) -> Iterator[None]:
        recorder = Recorder(default_monitors(engine), self._hz)
        with recorder:
            yield
        recorder.write_parquet(path)
        for note in recorder.notes:
            if note not in self._reported:
                self._reported.add(note)
                self._report(note)
