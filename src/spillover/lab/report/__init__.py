"""Reports of a result folder: a page, a Markdown file, tables, plots and the underlying events."""

from spillover.lab.report.write import ReportFiles, write_report

__all__ = ["ReportFiles", "write_report"]
