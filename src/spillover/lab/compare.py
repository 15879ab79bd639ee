"""Comparison of two results of the same measurement at two commits: faster, slower, same, or no difference shown.

A result is a folder of `spill lab run`, the JSON that it wrote (`--output-json`), or any JSON with raw repeats that
`spill bench` or a script of `benchmarks/` wrote. The two were not measured in turns, so their values do not pair: the
interval is Welch's, on logarithms, over the repeats of each. All intervals of a family (the primary metric, and
separately the others) hold together with the requested confidence, as in `verdict`.

The interval accounts only for the spread between repeats. A machine that was busier on one day than on the other looks
like a slower commit: measure a slower result again, or run both commits as arms of one experiment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillover.bench.statistics import student_quantile
from spillover.errors import SpilloverError
from spillover.lab.analysis import analyse
from spillover.lab.store import Results, difference, read_json
from spillover.lab.verdict import FASTER, NO_DIFFERENCE, NO_VERDICT, SAME, SLOWER, Rule, better

# Keys that distinguish elements of a list, and suffixes that say whether a list of numbers is times or rates.
NAMES = ("workload", "name", "arm", "backend", "way", "part", "model", "setting", "stage", "routing",
         "batch_size", "block_size", "requests", "tokens", "bytes", "ranks", "policy", "replicas", "rate")
TIMES = ("seconds", "latencies", "times", "_ms", "ttft", "tpot")
RATES = ("per_second", "throughput")
ORIGIN = ("commit", "date", "command", "versions", "hardware", "gpu", "engine", "provenance", "arguments", "before")


@dataclass(frozen=True)
class Sample:
    """Repeats of one measurement. `lower`: whether less is better."""

    values: tuple[float, ...]
    lower: bool
    primary: bool = True
    no_verdict_reason: str | None = None  # why there can be no verdict


@dataclass(frozen=True)
class Result:
    path: Path
    samples: Mapping[str, Sample]
    commit: str | None = None
    date: str | None = None
    machine: str | None = None
    experiment: Mapping[str, Any] | None = None  # the experiment of a lab folder

    @property
    def text(self) -> str:
        commit, dirty, _ = (self.commit or "unknown").partition("-dirty")
        return f"{self.path}: commit {commit[:12]}{dirty}, {self.date or 'no date'}"


@dataclass(frozen=True)
class Change:
    """The change of one measurement. `speed`: the speedup; above 1 is better, whichever direction the metric has."""

    name: str
    before: Sample
    after: Sample
    verdict: str
    why: str | None = None
    speed: float | None = None
    low: float | None = None
    high: float | None = None
    equivalence: float = field(default=0.0, compare=False)

    @property
    def word(self) -> str:
        if self.verdict == SAME:
            return f"same within {100 * self.equivalence:g}%"
        return f"{self.verdict}: {self.why}" if self.why else self.verdict

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "primary": self.before.primary, "verdict": self.verdict, "why": self.why,
                "speed": self.speed, "low": self.low, "high": self.high, "before": list(self.before.values),
                "after": list(self.after.values), "better": "lower" if self.before.lower else "higher"}


def read_result(path: Path) -> Result:
    if path.is_dir():
        results = Results.open(path)
        return _of_analysis(path, analyse(results), results.experiment.get("provenance") or {}, results.experiment)
    data = read_json(path)
    if isinstance(data, dict) and "cells" in data:
        return _of_analysis(path, data, data, data.get("experiment"))
    origin = data if isinstance(data, dict) else next((each for each in data if isinstance(each, dict)), {})
    found: dict[str, Sample] = {}
    for name, sample in _samples(data, ()):
        found.setdefault(name, sample)
    return Result(path, found, origin.get("commit"), origin.get("date"), _machine(origin))


def compare(before: Result, after: Result, rule: Rule) -> list[Change]:
    """Compare the samples that both have; raise SpilloverError if the two are not the same measurement."""
    if before.experiment is not None and after.experiment is not None:
        differs = difference(before.experiment, after.experiment)
        if differs is not None:
            raise SpilloverError(f"{before.path} and {after.path} are not of the same experiment: {differs}")
    if before.machine and after.machine and before.machine != after.machine:
        raise SpilloverError(f"{before.path} was measured on {before.machine} and {after.path} on {after.machine}: "
                             "they differ in more than the commit")
    names = [name for name in before.samples if name in after.samples]
    if not names:
        raise SpilloverError(f"{before.path} and {after.path} have no repeats of the same measurement; a comparison "
                             "takes two results with raw repeats, such as two folders of spill lab run NAME")
    judged = {primary: sum(before.samples[name].primary == primary for name in names) for primary in (True, False)}
    return [_change(name, before.samples[name], after.samples[name], rule, judged[before.samples[name].primary])
            for name in names]


def as_file(results: Results) -> dict[str, Any]:
    """Return the contents of `--output-json`: the analysis with the experiment and its provenance."""
    experiment = {key: value for key, value in results.experiment.items() if key not in ("document", "provenance")}
    return {**(results.experiment.get("provenance") or {}), **analyse(results), "experiment": experiment}


def _change(name: str, before: Sample, after: Sample, rule: Rule, family: int) -> Change:
    why = before.no_verdict_reason or after.no_verdict_reason
    if why is None and not all(0 < value < math.inf for value in (*before.values, *after.values)):
        why = "a value is 0 or missing, so there is no ratio"
    if why is None and min(len(before.values), len(after.values)) < 2:
        why = "one value does not show how much values vary"
    if why is not None:
        return Change(name, before, after, NO_VERDICT, why)
    middle, reach = _welch([math.log(value) for value in before.values], [math.log(value) for value in after.values],
                           rule.level(family))
    sign = -1 if before.lower else 1
    speed, low, high = (math.exp(sign * middle + shift) for shift in (0.0, -reach, reach))
    if 1 / (1 + rule.equivalence) < low and high < 1 + rule.equivalence:
        verdict = SAME
    else:
        verdict = FASTER if low > 1 else SLOWER if high < 1 else NO_DIFFERENCE
    return Change(name, before, after, verdict, None, speed, low, high, rule.equivalence)


def _welch(before: Sequence[float], after: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the difference of the means, and half the width of its interval, for unequal variances."""
    errors = [statistics.variance(each) / len(each) for each in (before, after)]
    total = sum(errors)
    middle = statistics.fmean(after) - statistics.fmean(before)
    if total == 0:
        return middle, 0.0
    freedom = total**2 / sum(error**2 / (len(each) - 1) for error, each in zip(errors, (before, after), strict=True))
    return middle, student_quantile(1 - (1 - confidence) / 2, max(1, math.floor(freedom))) * math.sqrt(total)


def _of_analysis(path: Path, analysis: Mapping[str, Any], origin: Mapping[str, Any],
                 experiment: Mapping[str, Any] | None) -> Result:
    """Read the experiment's metrics, of every arm on every workload."""
    metrics = (experiment or {}).get("metrics") or list(dict.fromkeys(each["metric"] for each in analysis["verdicts"]))
    found = {}
    for cell in analysis["cells"]:
        faults = "; ".join(fault["reason"] for fault in cell["faults"])
        problem = None if cell["valid"] else f"not valid in {path}: {faults or cell['reason'] or cell['status']}"
        for metric in metrics:
            values = tuple(float(value) for value in (cell["metrics"].get(metric) or {}).get("values") or ()
                           if value is not None)
            if values:
                found[f"{cell['workload']}, {cell['arm']}: {metric}"] = Sample(
                    values, better(metric) == "lower", metric == metrics[0], problem)
    return Result(path, found, origin.get("commit"), origin.get("date"), _machine(origin), experiment)


def _machine(origin: Mapping[str, Any]) -> str | None:
    hardware = origin.get("hardware")
    if not isinstance(hardware, Mapping):
        return origin.get("gpu")
    gpus = [str(each.get("name")) for each in hardware.get("gpus") or () if isinstance(each, Mapping)]
    return ", ".join(gpus) or f"{hardware.get('cores')} cores of {hardware.get('cpu')}"


def _samples(data: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Sample]]:
    """Yield lists of repeats, each named after its path in the data."""
    if isinstance(data, list):
        for index, each in enumerate(data):
            yield from _samples(each, (*names, *(_named(each) or (str(index),))))
    if not isinstance(data, Mapping):
        return
    if "repeats" in data:
        for more, values, lower in _repeats(data):
            yield ", ".join((*(names or _named(data)), *more)), Sample(values, lower)
    for key, value in data.items():
        if key in ORIGIN or key == "repeats" or (_numbers(value) and "unit" in data):
            continue
        if _numbers(value):
            lower, higher = (any(key.endswith(name) for name in kind) for kind in (TIMES, RATES))
            if lower or higher:
                yield ", ".join((*names, key)), Sample(tuple(map(float, value)), lower and not higher)
        else:
            yield from _samples(value, (*names, *(() if isinstance(value, list) else (key,))))


def _repeats(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[float, ...], bool]]:
    """Yield repeated values: numbers with a unit, or the seconds of runs, by arm if there are any."""
    values = data["repeats"]
    if _numbers(values):
        yield (), tuple(map(float, values)), _lower(data)
        return
    runs = [each for each in values if isinstance(each, Mapping)] if isinstance(values, list) else []
    for arm in dict.fromkeys(each.get("arm") for each in runs):
        own = [each for each in runs if each.get("arm") == arm]
        for name in ("elapsed_time", "elapsed", "seconds"):
            if all(name in each for each in own):
                yield (() if arm is None else (str(arm),)), tuple(float(each[name]) for each in own), True
                break


def _lower(data: Mapping[str, Any]) -> bool:
    """Return whether less is better: inferred from the share of the limit, otherwise from the unit."""
    value, limit, percent = (data.get(name) for name in ("value", "limit", "percent_of_limit"))
    if value and limit and percent and not math.isclose(value, limit, rel_tol=1e-6):
        return math.isclose(percent, 100 * limit / value, rel_tol=1e-6)
    return str(data.get("unit")) in ("s", "ms", "us", "%")


def _named(data: Any) -> tuple[str, ...]:
    found: list[str] = []
    if isinstance(data, Mapping) and "metric" in data:
        return tuple(str(data[name]) for name in ("workload", "metric") if name in data)
    for name in NAMES if isinstance(data, Mapping) else ():
        value = data.get(name)
        if isinstance(value, Mapping):
            found += [f"{key} {each}" for key, each in value.items()]
        elif isinstance(value, str | int | float):
            found.append(value if isinstance(value, str) else f"{name} {value}")
    return tuple(found)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in value)
