"""The book: every week's page with its measurements, check outcomes and plots, in one HTML file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from spillover.course.plots import color, plot
from spillover.course.runs import CourseRun, runs_of
from spillover.course.shape import FAILS, HOLDS, UNDECIDED, check
from spillover.course.tables import filled_rows, number
from spillover.course.week import Week, all_weeks
from spillover.errors import SpilloverError
from spillover.lab.report.page_template import render_page
from spillover.lab.store import write_bytes

TONES = {HOLDS: "good", FAILS: "bad", UNDECIDED: "warn"}


def write_book(results: Path, path: Path, weeks: list[Week] | None = None) -> Path:
    """Write the book of a folder of results."""
    write_bytes(path, render(results, weeks if weeks is not None else all_weeks()).encode())
    return path


def render(results: Path, weeks: list[Week]) -> str:
    return render_page("book.html", "spillover.course", weeks=[_week(results, week) for week in weeks], number=number,
                       color=color, tones=TONES)


def html_of(text: str) -> Markup:
    """Return Markdown as HTML; HTML tags inside it are escaped, not interpreted."""
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise SpilloverError("Writing the book needs the lab extra: pip install 'spillover[lab]'") from error
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _week(results: Path, week: Week) -> dict[str, Any]:
    runs = [_run(run) for run in runs_of(results, week)]
    counts = {word: sum(outcome.outcome == word for run in runs for outcome in run["outcomes"]) for word in TONES}
    return {"week": week, "page": html_of(_without_title(week.page)), "runs": runs,
            "counts": {word: count for word, count in counts.items() if count}}


def _run(run: CourseRun) -> dict[str, Any]:
    rows = filled_rows(run)
    drawn = [(each.row, [name for name, _ in each.rows], plot(each)) for each in rows
             if each.row.name in run.week.plots]
    when = datetime.datetime.fromtimestamp(float(run.saved.get("updated") or 0), datetime.UTC)
    reports = [run.experiment_folder(step.name) / "report.html" for step in run.week.experiments]
    return {"run": run, "rows": rows, "outcomes": check(run), "when": f"{when:%Y-%m-%d %H:%M} UTC",
            "plots": [(row, names, picture) for row, names, picture in drawn if picture is not None],
            "reports": [path.relative_to(run.folder.parent) for path in reports if path.is_file()],
            "labels": sorted({arm["label"] for results, _ in run.opened.values() for arm in results.experiment["arms"]
                              if arm.get("label")})}


def _without_title(text: str) -> str:
    """Remove the first heading, as the book has its own."""
    first, _, rest = text.partition("\n")
    return rest if first.startswith("# ") else text
