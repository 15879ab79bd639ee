"""The time of a replica's step: a few coefficients, fitted to measured steps of the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from spillover.errors import SpilloverError

FORMAT = "spillover-step-costs/1"


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0  # sum over prompts of tokens computed x mean number of tokens that they attend to
    decode_rows: int = 0
    decode_context: int = 0  # tokens in the caches of all rows that decode


@dataclass(frozen=True)
class StepCosts:
    """Coefficients in seconds. The time of a step is the sum of its counts times these."""

    step: float = 0.0  # fixed cost of any step
    prefill_token: float = 0.0
    prefill_pair: float = 0.0
    decode_row: float = 0.0
    context_token: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return (self.step + self.prefill_token * load.prefill_tokens + self.prefill_pair * load.prefill_pairs
                + self.decode_row * load.decode_rows + self.context_token * load.decode_context)


@dataclass(frozen=True)
class Point:
    """A measured step."""

    load: StepLoad
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Costs and their fit to the measurements, with errors as shares of the measured seconds."""

    costs: StepCosts
    points: tuple[Point, ...] = ()

    @property
    def errors(self) -> list[float]:
        return [self.costs.seconds(point.load) / point.seconds - 1 for point in self.points]

    @property
    def mean_error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.points) if self.points else math.nan

    @property
    def worst_error(self) -> float:
        return max(map(abs, self.errors), default=math.nan)


def fit(points: Sequence[Point]) -> Fit:
    """Fit nonnegative costs with the least squares of relative errors."""
    if not points:
        raise SpilloverError("no measured step to fit costs to; measure some with --costs measure")
    rows = np.array([[1.0, point.load.prefill_tokens, point.load.prefill_pairs, point.load.decode_rows,
                      point.load.decode_context] for point in points])
    taken = np.array([point.seconds for point in points])
    scaled = rows / taken[:, None]
    widths = np.abs(scaled).max(axis=0)
    used = [column for column in range(rows.shape[1]) if widths[column] > 0]
    found = np.zeros(rows.shape[1])
    while used:  # drop the most negative coefficient until none is negative
        part, *_ = np.linalg.lstsq(scaled[:, used] / widths[used], np.ones(len(points)), rcond=None)
        if part.min() >= -1e-12:
            found[used] = np.maximum(part, 0.0) / widths[used]
            break
        used.pop(int(part.argmin()))
    return Fit(StepCosts(*(float(each) for each in found)), tuple(points))


@dataclass(frozen=True)
class Measured:
    """A measured replica: its step costs, and the other defaults that a simulation takes from it."""

    fit: Fit
    source: str  # origin of the costs, for the reader
    model: str | None = None
    request_seconds: float = 0.0  # time of a request outside of steps: HTTP, tokenising, messages
    router_seconds: float = 0.0  # time that a router adds
    kv_bytes_per_token: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


SETTINGS = ("model", "request_seconds", "router_seconds", "kv_bytes_per_token", "block_size", "num_blocks",
            "max_num_seqs", "max_num_batched_tokens")


def given(text: str) -> Measured | None:
    """Return costs given as `STEP,TOKEN` in milliseconds, as for --simulate-step; None if `text` has another form."""
    try:
        step, token = (float(part) / 1e3 for part in text.split(","))
    except ValueError:
        return None
    if not (0 <= step < 60 and 0 <= token < 1 and step + token > 0):
        raise SpilloverError(f"--costs {text}: give milliseconds of a step and of each of its tokens, such as 4,0.05")
    return Measured(Fit(StepCosts(step, token, 0.0, token)), f"given, not measured: {text} ms")


def as_json(measured: Measured) -> dict[str, Any]:
    """Return the contents of a cost file."""
    points = [{**asdict(point.load), "seconds": point.seconds} for point in measured.fit.points]
    return {"format": FORMAT, **{name: getattr(measured, name) for name in SETTINGS},
            "coefficients": asdict(measured.fit.costs), "points": points}


def read_costs(path: str) -> Measured:
    """Read a cost file; raise SpilloverError if it is invalid. If it has points, the costs are fitted to them again."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpilloverError(f"cannot read --costs '{path}': {error.strerror}; give a file that `spill simulate "
                             "--costs measure --save-costs FILE` wrote, or STEP,TOKEN in milliseconds") from error
    except ValueError as error:
        raise SpilloverError(f"'{path}' is not a cost file: it is not JSON ({error})") from error
    try:
        return _measured(value, path)
    except (KeyError, TypeError, ValueError) as error:
        raise SpilloverError(f"'{path}' is not a cost file: {error!r}; `spill simulate --costs measure --save-costs "
                             "FILE` writes one") from error


def _measured(value: Mapping[str, Any], path: str) -> Measured:
    if value["format"] != FORMAT:
        raise ValueError(f"its format is {value['format']!r}, not {FORMAT!r}")
    points = [Point(StepLoad(int(each["prefill_tokens"]), float(each["prefill_pairs"]), int(each["decode_rows"]),
                             int(each["decode_context"])), _positive(each["seconds"])) for each in value["points"]]
    known = {field.name for field in fields(StepCosts)}
    stated = StepCosts(**{name: _not_negative(each) for name, each in value["coefficients"].items() if name in known})
    made = Measured(fit(points) if points else Fit(stated), Path(path).name)
    return replace(made, **{name: value[name] for name in SETTINGS if value.get(name) is not None})


def _positive(value: Any) -> float:
    if not (number := _not_negative(value)) > 0:
        raise ValueError(f"a step of {value!r} seconds")
    return number


def _not_negative(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r} where seconds should be")
    return number
