"""REPORT.md: the verdicts, tables and commands of the page as Markdown, for a repository or an email."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.lab.report import wording
from spillover.lab.report.data import Report
from spillover.lab.report.metric import metric
from spillover.lab.report.ranks_table import ranks
from spillover.lab.report.speculation_table import speculation
from spillover.lab.report.tables import Table, TableCell, accuracy, gain_text, measured, secondary, sweeps


def markdown(report: Report, plots: Sequence[str]) -> str:
    """Write the report as Markdown. `plots`: paths of images, relative to the folder of the text."""
    parts = [f"# {report.name}", report.about]
    parts += [f"> **{warning}**" for warning in wording.warnings(report)]
    parts += [_facts(wording.top_facts(report)), "## Verdict", *_verdicts(report)]
    parts += _pictures(plots, ("benchmark_results",))
    parts.append("## Measured")
    for table in filter(None, (accuracy(report), speculation(report), ranks(report), *sweeps(report))):
        parts += [f"### {table.title}", _table(table), table.about]
    for name, workloads in report.groups().items():
        facts = wording.short_facts(workloads[0])
        parts += [f"### {name}", *([facts] if facts else [])]
        for workload in workloads:
            parts += [*([f"**{workload.name}**"] if len(workloads) > 1 else []), _table(measured(report, workload))]
    parts += _pictures(plots, (), ("benchmark_results",))
    parts += ["## Validity", *_validity(report)]
    others = secondary(report)
    if others is not None:
        parts += ["## Other metrics", _table(others), others.about]
    parts += ["## How it was run", f"```sh\n{wording.again(report)}\n```"]
    for arm in report.arms:
        version = f"{arm.engine} {arm.version}".strip() + (f", preset `{arm.preset}`" if arm.preset else "")
        parts += [f"### {arm.name} ({version})", *([arm.about] if arm.about else [])]
        if arm.command:
            parts.append(f"```sh\n{wording.env_prefix(arm)}{arm.command}\n```")
    parts.append("### Workloads")
    for workload in report.workloads:
        load = wording.load_command(report, workload)
        parts += [f"**{workload.name}** {workload.about}".strip(), f"```sh\n{load}\n```"]
    parts += ["### Machine and versions", _facts(wording.machine_facts(report)), "### What the words mean",
              "\n".join(f"- **{name}**: {about}" for name, about in wording.definitions(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdicts(report: Report) -> list[str]:
    verdicts = wording.judged(report)
    if not verdicts:
        return [f"Nothing to compare: no arm except {report.baseline} ran."]
    what = metric(report.primary)
    rows = [tuple(map(TableCell, (verdict.workload, verdict.arm, f"**{verdict.word}**", gain_text(verdict),
                                  wording.against(report, verdict) or "-", str(verdict.blocks), verdict.why or "")))
            for verdict in verdicts]
    headings = ("workload", "arm", "verdict", f"times better than {report.baseline}", what.title, "blocks", "why")
    table = Table("", headings, tuple(rows), 3)
    return [f"By {what.title}, {wording.confidence(report)} intervals over paired blocks. {report.stop_text}",
            _table(table), wording.method(report)]


def _validity(report: Report) -> list[str]:
    faults = wording.faults(report)
    lines = [f"- **{fault.gate}**{'' if fault.fatal else ' (note)'}: {fault.reason} ({fault.where})"
             + (f"\n\n```\n{fault.log_tail}\n```\n" if fault.log_tail else "") for fault in faults]
    passed = not any(fault.fatal for fault in faults)
    parts = [*([f"Every run passed every gate: {wording.gates(report)}."] if passed else []), "\n".join(lines)]
    missing = [f"- **{arm.name}**: {arm.reason or arm.status}" + (f"; `{arm.install}`" if arm.install else "")
               for arm in wording.not_installed(report)]
    return [*parts, *(["Not measured:", "\n".join(missing)] if missing else []), wording.client(report)]


def _table(table: Table) -> str:
    rule = ["---" if index < table.numbers_from else "---:" for index in range(len(table.headings))]
    lines = [table.headings, rule, *([_cell(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: TableCell) -> str:
    return (f"{cell.text} ({cell.detail})" if cell.detail else cell.text).replace("|", "\\|")


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts)


def _pictures(plots: Sequence[str], only: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    names = {plot: plot.rpartition("/")[2].removesuffix(".png") for plot in plots}
    return [f"![{name}]({plot})" for plot, name in names.items()
            if (name in only if only else name not in without)]
