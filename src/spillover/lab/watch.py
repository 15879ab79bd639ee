"""Monitors beside one visit, and what they saw in a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spillover.lab.engines import Engine
from spillover.lab.monitors import Recorder, default_monitors

HZ = 2.0


class Monitored:
    """Monitors beside a run: `with watch(engine, path):`. What could not be watched is told once."""

    def __init__(self, tell: Callable[[str], None] = lambda note: None, hz: float = HZ) -> None:
        self._tell, self._hz = tell, hz
        self._told: set[str] = set()

    @contextmanager
    def __call__(self, engine: Engine, path: Path) -> Iterator[None]:
        recorder = Recorder(default_monitors(engine), self._hz)
        with recorder:
            yield
        recorder.write_parquet(path)
        for note in recorder.notes:
            if note not in self._told:
                self._told.add(note)
                self._tell(note)
