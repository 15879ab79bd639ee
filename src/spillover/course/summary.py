"""Summary of a folder of results, as JSON (weeks, minutes, metrics, checks with numbers) and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spillover.course.runs import CourseRun, runs_of
from spillover.course.shape import FAILS, HOLDS, UNDECIDED, check
from spillover.course.tables import filled_rows
from spillover.course.week import Week

FROM = ("date", "commit", "versions", "hardware")
HEAD = "| week | engine | minutes | check | outcome | measured |\n|---|---|---|---|---|---|"


def summary(results: Path, weeks: Sequence[Week], note: str = "") -> dict[str, Any]:
    """Return a summary of every run of every week, in the weeks' order, with spillover's runs first."""
    runs = [run for week in weeks for run in reversed(runs_of(results, week))]
    runs.sort(key=lambda run: (run.week.number, run.scale, run.engine != "spillover", run.engine))
    entries = [_run(run) for run in runs]
    checks = [each["outcome"] for run in entries for each in run["checks"]]
    return {"note": note, "minutes": sum(run["minutes"] for run in entries),
            "checks": {word: checks.count(word) for word in (HOLDS, FAILS, UNDECIDED)}, "runs": entries}


def table(report: Mapping[str, Any]) -> str:
    """Return a summary's checks as a Markdown table."""
    lines = [HEAD]
    for run in report["runs"]:
        for index, each in enumerate(run["checks"]):
            first = (f"{run['week']}: {run['title']}", run["engine"], f"{run['minutes']:.1f}")
            cells = (*(first if not index else ("",) * 3), each["says"], each["outcome"], each["text"])
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _run(run: CourseRun) -> dict[str, Any]:
    opened = list(run.opened.values())
    sessions = [session for results, _ in opened for session in results.sessions[:1]]
    return {
        "week": run.week.number, "title": run.week.title, "scale": run.scale, "engine": run.engine,
        "minutes": run.seconds / 60,
        "from": {key: sessions[0][key] for key in FROM if key in sessions[0]} if sessions else None,
        "blocks": {name: analysis["blocks"] for name, (_, analysis) in run.opened.items()},
        "stopped": {name: analysis["stopped"]["reason"] for name, (_, analysis) in run.opened.items()},
        "versions": {arm["name"]: arm_json.get("version") for results, _ in opened for arm in results.experiment["arms"]
                     if (arm_json := results.arms.get(arm["name"]) or {}).get("version")},
        "checks": [{"says": each.expectation.says, "outcome": each.outcome, "text": each.text, "ratio": each.ratio,
                    "low": each.low, "high": each.high} for each in check(run)],
        "metrics": [{"name": filled.row.name, "unit": filled.row.unit, "notes": list(filled.notes), "values": [
            {"of": name, "on": column, "median": cell.median, "runs": len(cell.values)}
            for name, cells in filled.rows for column, cell in zip(filled.columns, cells, strict=True)
            if cell is not None and cell.values]} for filled in filled_rows(run)],
    }
