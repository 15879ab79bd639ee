"""From a folder of results to what people read: a page, a Markdown file, tables, plots and the events behind them."""

from spillover.lab.report.write import ReportFiles, write_report

__all__ = ["ReportFiles", "write_report"]
