"""Values of a run by their names in a week: metrics of the lab, facts of arms, scores, monitors, JSON keys."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spillover.course.runs import CourseRun
from spillover.course.week import Value
from spillover.lab.analysis import disturbed
from spillover.lab.store import Results

MOST = 0.5  # minimum share of runs that must remain without those disturbed by other load on the machine
BLOCK_SIZE = 16  # the default of spillover and vLLM, for arms that set none


@dataclass(frozen=True)
class Series:
    """One number of one arm on one workload, or of one result of a command, with all its measurements."""

    row: str  # the arm, or the label of the value
    column: str  # the workload, or the key that distinguishes results of a command
    values: tuple[float, ...] = ()
    passes: tuple[int, ...] = ()  # the lab's pass of each value; empty if the values do not pair
    why: str = ""  # why there are no values, or why they do not count
    passing: bool = False  # whether more runs may make the values count

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None


def series(run: CourseRun, value: Value) -> list[Series]:
    """Return the numbers of a value. If there are none, the only entry says why."""
    found = list(_of_command(run, value) if value.kind == "key" else _of_experiment(run, value))
    return found or [Series(value.label or value.of, "", why=f"{value.of} has no such values")]


def _of_experiment(run: CourseRun, value: Value) -> Iterator[Series]:
    if value.of not in run.opened:
        yield Series(value.label or value.of, "", why=run.reason(value.of))
        return
    results, analysis = run.opened[value.of]
    arms = [arm for arm in results.experiment["arms"] if not value.arms or arm["name"] in value.arms]
    if value.kind in ("fact", "score"):
        for arm in arms:
            yield _once(results, arm, value)
        return
    cells = {(cell["arm"], cell["workload"]): cell for cell in analysis["cells"]}
    for arm in arms:
        for workload in results.experiment["workloads"]:
            if value.workloads and not {workload["name"], workload["group"]} & set(value.workloads):
                continue
            yield _of_cell(results, cells.get((arm["name"], workload["name"])) or {}, arm["name"], workload, value)


def _of_cell(results: Results, cell: Mapping[str, Any], arm: str, workload: Mapping[str, Any], value: Value) -> Series:
    visits = [visit for visit in results.visits
              if visit["arm"] == arm and visit["workload"] == workload["name"] and visit["status"] == "ok"]
    sound = [visit for visit in visits if not disturbed(visit)]  # the lab also leaves the others out of its comparisons
    read = _monitored if value.kind == "monitor" else _metric
    found = [(read(results, visit, value), int(visit["pass"])) for visit in sound or visits]
    known = [(number * value.factor, pass_) for number, pass_ in found if number is not None]
    why = "" if known else f"{arm} does not report {value.names[0]}"
    if not visits:
        why = str(cell.get("reason") or f"{arm} has not been run on {workload['name']} yet")
    faults = [fault for fault in cell.get("faults") or () if fault.get("metric") in (None, *value.names)
              and (not fault["transient"] or len(sound) < MOST * len(visits))]
    return Series(_row(arm, value), _column(workload), tuple(number for number, _ in known),
                  tuple(pass_ for _, pass_ in known), why or "; ".join(fault["reason"] for fault in faults),
                  not why and all(fault["transient"] or fault["gate"] == "drift" for fault in faults))


def _metric(_results: Results, visit: Mapping[str, Any], value: Value) -> float | None:
    return _combined([visit["metrics"].get(name) for name in value.names],
                     visit["metrics"].get(value.over) if value.over else 1.0)


def _monitored(results: Results, visit: Mapping[str, Any], value: Value) -> float | None:
    """Return the mean of a monitor's samples while requests were in flight."""
    from spillover.lab.report.monitored import choices

    path = results.path / str(visit.get("monitors"))
    if not path.is_file():
        return None
    start = float(visit.get("start_unix") or visit["started"])
    length = float(visit.get("duration") or visit.get("seconds") or math.inf)
    for choice in choices(path, start):
        points = [number for at, number in choice.points if 0 <= at <= length]
        if choice.name == value.names[0] and points:
            return sum(points) / len(points)
    return None


def _once(results: Results, arm: Mapping[str, Any], value: Value) -> Series:
    """Return a value that an arm reports once: a fact of its start, or its accuracy."""
    name = str(arm["name"])
    arm_json = results.arms.get(name) or {}
    if value.kind == "score":
        evaluation = results.evals.get(name) or {}
        number = (evaluation.get("scores") or {}).get(value.names[0])
        why = evaluation.get("reason") or arm_json.get("reason") or f"{name} has no {value.names[0]}"
    else:
        number = arm_json.get(value.names[0])
        if value.names[0] == "pool_blocks" and arm_json.get("device_pool_tokens"):
            number = arm_json["device_pool_tokens"] / int(arm["spec"]["args"].get("block-size", BLOCK_SIZE))
        why = arm_json.get("reason") or f"{name} does not report {value.names[0]}"
    values = () if not isinstance(number, int | float) else (float(number) * value.factor,)
    return Series(_row(name, value), "", values, why="" if values else str(why))


def _of_command(run: CourseRun, value: Value) -> Iterator[Series]:
    if value.of not in run.measured:
        yield Series(value.label or value.of, "", why=run.reason(value.of))
        return
    for result in run.measured[value.of]:
        if any(str(_at(result, key)) != str(wanted) for key, wanted in value.where.items()):
            continue
        lists = [found for name in value.names if (found := _numbers(_at(result, name)))]
        below = _numbers(_at(result, value.over)) if value.over else []
        values = tuple(value.factor * sum(parts) for parts in zip(*lists, strict=False))
        if value.over:
            values = tuple(number / low for number, low in zip(values, below, strict=False) if low)
        what = value.each.rpartition(".")[2].replace("_", " ")
        column = f"{what} {_at(result, value.each)}" if value.each else ""
        yield Series(value.label or value.of, column, values,
                     why="" if values else f"{value.of} does not report {value.names[0]}")


def _at(result: Any, path: str) -> Any:
    """Return the value at a path of keys and indices; None if there is none."""
    for part in path.split("."):
        if isinstance(result, Mapping):
            result = result.get(part)
        elif isinstance(result, list) and part.isdigit() and int(part) < len(result):
            result = result[int(part)]
        else:
            return None
    return result


def _numbers(found: Any) -> list[float]:
    """Return a number as a list, the numbers of a list, or low, median and high of an interval."""
    if isinstance(found, Mapping):
        found = [found.get(end) for end in ("low", "median", "high")]
    given = found if isinstance(found, list) else [found]
    return [float(each) for each in given if isinstance(each, int | float) and not isinstance(each, bool)]


def _combined(parts: Sequence[Any], below: Any) -> float | None:
    numbers = [float(part) for part in parts if isinstance(part, int | float)]
    if not numbers or not isinstance(below, int | float) or not below:
        return None
    return sum(numbers) / float(below)


def _row(arm: str, value: Value) -> str:
    return f"{arm}, {value.label}" if value.label else arm


def _column(workload: Mapping[str, Any]) -> str:
    sweep = workload.get("sweep") or {}
    if not sweep:
        return str(workload["name"])
    return f"{workload['group']} {', '.join(str(value) for value in sweep.values())}"
