"""The error of simulations against real runs: reads the results of `benchmarks/simulate.py` and describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError

FORMAT = "spillover-simulator-calibration/1"
WITHIN = 0.10  # the target for the error
DEFAULT = "benchmarks/results/simulator.json"
NOT_COMPARED = "not compared with real runs"
COMPARED = ("ttft_mean", "requests_per_second")  # metrics that must be within the target


@dataclass(frozen=True)
class Compared:
    """One real run and the errors of its simulation."""

    workload: str
    replicas: int
    policy: str
    rate: float  # requests per second
    errors: Mapping[str, float]  # predicted / measured - 1, by metric


@dataclass(frozen=True)
class Calibration:
    source: str
    points: tuple[Compared, ...]
    step: str = ""  # step costs of the runs
    date: str = ""
    worst: Mapping[str, float] = field(default_factory=dict)  # largest error of all points, by metric

    def lines(self) -> list[str]:
        """Return the lines to print with every result."""
        sizes = ", ".join(str(size) for size in sorted({point.replicas for point in self.points}))
        worst = max((abs(self.worst[name]) for name in COMPARED if name in self.worst), default=0.0)
        shown = [f"Error against real runs ({self.source}, {self.date[:10] or 'no date'}): mean TTFT and throughput "
                 f"within {worst:.1%} of the measured, {len(self.points)} runs of {sizes} replicas with known step "
                 f"costs ({self.step} ms); aim {WITHIN:.0%}. The error of fitted step costs comes on top"]
        for point in self.points:
            each = ", ".join(f"{name} {error:+.1%}" for name, error in point.errors.items())
            shown.append(f"  {point.workload}, {point.rate:g} requests/s, {point.replicas} x {point.policy}: {each}")
        return shown


def errors(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """Return predicted / measured - 1 for each metric measured above 0."""
    return {name: predicted[name] / value - 1 for name, value in measured.items() if value > 0 and name in predicted}


def read_calibration(path: str | None) -> Calibration | None:
    """Read a results file; None if no path is given and the default file does not exist."""
    if path is None:
        if not Path(DEFAULT).is_file():
            return None
        path = DEFAULT
    try:
        value: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, not {FORMAT!r}")
        points = tuple(Compared(str(each["workload"]), int(each["replicas"]), str(each["policy"]),
                                float(each["rate"]), errors(each["measured"], each["predicted"]))
                       for each in value["points"])
        worst: dict[str, float] = {}
        for point in points:
            for name, error in point.errors.items():
                worst[name] = max(worst.get(name, 0.0), error, key=abs)
        return Calibration(Path(path).name, points, str(value.get("step", "")), str(value.get("date", "")), worst)
    except OSError as error:
        raise SpilloverError(f"cannot read --calibration '{path}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpilloverError(f"'{path}' is not a file of benchmarks/simulate.py: {error!r}") from error
