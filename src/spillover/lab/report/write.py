"""The files of a report, written into the folder of its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spillover.lab.report.data import read_report
from spillover.lab.report.figures import figures
from spillover.lab.report.html import render
from spillover.lab.report.markdown import markdown
from spillover.lab.report.parquet import write_requests
from spillover.lab.report.plots import write_plots
from spillover.lab.report.tables import detailed_rows, summary_rows, write_csv


@dataclass(frozen=True)
class ReportFiles:
    html: Path
    markdown: Path
    summary_csv: Path
    detailed_csv: Path
    parquet: Path
    plots: tuple[Path, ...]

    def all(self) -> tuple[Path, ...]:
        return (self.html, self.markdown, self.summary_csv, self.detailed_csv, self.parquet, *self.plots)


def write_report(folder: Path) -> ReportFiles:
    """Write the report. `folder`: the results of an experiment, finished or not."""
    report = read_report(folder)
    drawn = figures(report)
    html = folder / "report.html"
    html.write_text(render(report, drawn), encoding="utf-8")
    summary = write_csv(folder / "summary.csv", summary_rows(report))
    detailed = write_csv(folder / "detailed.csv", detailed_rows(report))
    parquet = write_requests(folder / "data.parquet", report)
    plots = write_plots(folder, report, drawn)
    text = folder / "REPORT.md"
    text.write_text(markdown(report, [plot.relative_to(folder).as_posix() for plot in plots]), encoding="utf-8")
    return ReportFiles(html, text, summary, detailed, parquet, plots)
