"""The interface of a monitor: an object that can be read many times during a run at low cost.

A reading is a mapping of numbers by name, `power_watts{gpu="0"}` -> 312.0. A value that cannot be read is left out,
never 0. Rates are since the previous reading, so the first reading has none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Row(NamedTuple):
    """One value, as a row of the Parquet file (long format)."""

    time: float  # unix seconds
    source: str
    metric: str
    value: float


class Monitor(Protocol):
    """A source of readings; `open` returns why it is unavailable (it is then not used), or None."""

    @property
    def source(self) -> str: ...

    def open(self) -> str | None: ...

    def read(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


class Rates:
    """A converter of increasing totals into growth per second."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def per_second(self, name: str, total: float, now: float | None = None) -> float | None:
        """Return the growth per second; None at the first reading and after a total was reset."""
        at = time.monotonic() if now is None else now
        before = self._before.get(name)
        self._before[name] = at, total
        if before is None or at <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (at - before[0])


def named(metric: str, **labels: object) -> str:
    """Add labels to a name: `named("rss_bytes", pid=1)` -> `rss_bytes{pid="1"}`."""
    inside = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{metric}{{{inside}}}" if inside else metric


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
