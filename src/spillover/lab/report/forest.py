"""The layout of verdicts: intervals around 1x for single workloads, a matrix for the steps of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spillover.lab.report import wording
from spillover.lab.report.data import Report, Verdict, Workload
from spillover.lab.report.tables import times

TONES = {"faster": "good", "slower": "bad", "same": "same", "no difference shown": "none", "no verdict": "warn"}
# Tick values of the axis in order of priority; one that would touch another is left out.
MARKS = (1, 2, 0.5, 5, 0.2, 10, 0.1, 1.5, 0.75, 3, 1.25, 20, 50, 100, 0.05, 0.02, 0.01, 1000, 0.9, 1.1, 0.95, 1.05)
APART = 7.0  # minimum distance of ticks in percent of the width


@dataclass(frozen=True)
class Tick:
    left: float
    text: str


@dataclass(frozen=True)
class Row:
    """One verdict; positions are percent of the width, None if there is nothing to draw."""

    arm: str
    label: str
    word: str
    tone: str
    gain: str
    interval: str
    values: str
    why: str
    title: str
    left: float | None = None
    low: float = 0.0
    width: float = 0.0
    blocks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Line:
    """An arm over the steps of a sweep. `why`: the reason if no step has a verdict and all have the same one."""

    arm: str
    label: str
    cells: tuple[Row | None, ...]
    why: str = ""


@dataclass(frozen=True)
class Group:
    """One workload (`rows`), or a sweep (`columns`, and `lines` with one cell per step)."""

    name: str
    about: str
    rows: tuple[Row, ...] = ()
    columns: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()

    @property
    def drawn(self) -> bool:
        """Return whether any row is drawn on the axis."""
        return any(row.left is not None for row in self.rows)


@dataclass(frozen=True)
class Forest:
    ticks: tuple[Tick, ...]
    groups: tuple[Group, ...]
    band: tuple[float, float] = (0.0, 0.0)  # left and width of the range that counts as the same

    @property
    def intervals(self) -> bool:
        return any(group.drawn for group in self.groups)


def forest(report: Report) -> Forest:
    verdicts = wording.judged(report)
    single = {workload.name for workloads in report.groups().values() if len(workloads) == 1
              for workload in workloads}
    ends = [end for verdict in verdicts if verdict.gains and verdict.verdict != "no verdict"
            and verdict.workload in single
            for end in (*verdict.gains, *_blocks(verdict))]
    low, high = _range(ends)

    def left(value: float) -> float:
        place = 100 * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return round(min(100.0, max(0.0, place)), 3)

    groups = [_group(report, name, workloads, verdicts, left) for name, workloads in report.groups().items()]
    ticks: list[Tick] = []
    for mark in MARKS:
        if low <= mark <= high and all(abs(left(mark) - tick.left) >= APART for tick in ticks):
            ticks.append(Tick(left(mark), f"{mark:g}x"))
    margin = 1 + float(report.plan["equivalence"])
    band = left(1 / margin), round(left(margin) - left(1 / margin), 3)
    return Forest(tuple(ticks), tuple(group for group in groups if group.rows or group.lines), band)


def _group(report: Report, name: str, workloads: Sequence[Workload], verdicts: Sequence[Verdict],
           left: Callable[[float], float]) -> Group:
    found = {(verdict.workload, verdict.arm): _row(report, verdict, left) for verdict in verdicts}
    arms = [arm.name for arm in report.arms if any((workload.name, arm.name) in found for workload in workloads)]
    title = name if len(report.groups()) > 1 or len(workloads) > 1 else ""
    if len(workloads) == 1:
        return Group(title, workloads[0].about, tuple(found[workloads[0].name, arm] for arm in arms))
    axes = list(dict.fromkeys(axis for workload in workloads for axis in workload.sweep))
    columns = tuple(" ".join(str(workload.sweep.get(axis, "")) for axis in axes) for workload in workloads)
    about = f"by {', '.join(axes)}" + (f"; {workloads[0].about}" if workloads[0].about else "")
    lines = []
    for arm in arms:
        cells = tuple(found.get((workload.name, arm)) for workload in workloads)
        reasons = {cell.why if cell is not None and cell.word == "no verdict" else "" for cell in cells}
        lines.append(Line(arm, report.arm(arm).label, cells, reasons.pop() if len(reasons) == 1 else ""))
    return Group(title, about, columns=columns, lines=tuple(lines))


def _row(report: Report, verdict: Verdict, left: Callable[[float], float]) -> Row:
    tone, arm = TONES.get(verdict.verdict, "none"), report.arm(verdict.arm)
    values = wording.against(report, verdict)
    if verdict.gains is None or verdict.verdict == "no verdict":  # a number without a verdict would be read as one
        return Row(verdict.arm, arm.label, verdict.word, tone, "", "", values, verdict.why, verdict.why)
    gain, low, high = verdict.gains
    interval = f"{times(low)} .. {times(high)}" if verdict.low is not None else f"{verdict.blocks} block"
    title = "; ".join(part for part in (verdict.word, f"{times(gain)}x ({interval})", f"{verdict.blocks} blocks",
                                        values, verdict.why) if part)
    return Row(verdict.arm, arm.label, verdict.word, tone, f"{times(gain)}x", interval, values, verdict.why, title,
               left(gain), left(low), round(left(high) - left(low), 3), tuple(map(left, _blocks(verdict))))


def _blocks(verdict: Verdict) -> list[float]:
    return [gain for ratio in verdict.block_ratios if (gain := verdict.gain(ratio)) is not None]


def _range(ends: Sequence[float]) -> tuple[float, float]:
    """Return a range that contains 1 and all ends, and is wide enough that noise does not look large."""
    low, high = min([*ends, 1 / 1.06]), max([*ends, 1.06])
    room = (high / low) ** 0.06
    return low / room, high * room
