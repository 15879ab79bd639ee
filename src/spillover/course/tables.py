"""The table of metrics of a week, filled from a run: each row is a small matrix."""

from __future__ import annotations

from dataclasses import dataclass

from spillover.course.runs import CourseRun
from spillover.course.values import Series, series
from spillover.course.week import Row


@dataclass(frozen=True)
class Filled:
    """A row of the table of metrics. `rows` has a line per arm or label, with a cell per column."""

    row: Row
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Series | None, ...]], ...]
    notes: tuple[str, ...]  # why values are missing or do not count

    @property
    def measured(self) -> bool:
        return any(cell is not None and cell.values for _, cells in self.rows for cell in cells)


def filled(run: CourseRun, row: Row) -> Filled:
    """Fill a row with the numbers of a run."""
    steps = _steps(run)
    parts = [series(run, value) for value in row.values if value.of in steps]
    with_values = [part for part in parts if any(each.values for each in part)]
    found = [each for part in with_values or parts for each in part]  # without values that others replace
    known = [each for each in found if each.values]
    columns = tuple(dict.fromkeys(each.column for each in known))
    names = dict.fromkeys(each.row for each in known)
    cells = {(each.row, each.column): each for each in known}
    notes = [row.absent[run.scale]] if run.scale in row.absent else []
    notes += [f"{each.row}: {each.why}" if each.row not in each.why else each.why for each in found if each.why]
    if not known and not notes:
        notes = ["not run"]
    return Filled(row, columns, tuple((name, tuple(cells.get((name, column)) for column in columns)) for name in names),
                  tuple(dict.fromkeys(notes)))


def filled_rows(run: CourseRun) -> list[Filled]:
    return [filled(run, row) for row in run.week.metrics]


def number(value: float) -> str:
    """Format a number with a readable number of digits."""
    size = abs(value)
    if size >= 10:
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or not size else f"{value:.3g}"


def _steps(run: CourseRun) -> set[str]:
    """Return the steps that exist at this size; the row itself explains missing ones."""
    return ({step.name for step in run.week.experiments if run.scale in step.scales}
            | {step.name for step in run.week.commands if run.scale in step.run and run.engine == "spillover"})
