"""`spill lab`: experiments that compare ways to serve a model, and their reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from spillover.cli.bench.measuring import make_console
from spillover.cli.lab.lab_compare import compare
from spillover.cli.lab.lab_publish import badge, publish
from spillover.cli.options import comma_list

if TYPE_CHECKING:
    from spillover.lab.experiment import Experiment

RESULTS = "lab-results"


def time_option(_context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    from spillover.errors import SpilloverError
    from spillover.units import parse_seconds

    try:
        seconds = None if value is None else parse_seconds(value)
    except SpilloverError as error:
        raise click.BadParameter(str(error)) from error
    if seconds == 0:
        raise click.BadParameter("give a time such as 30min or 2h")
    return seconds


output_json = click.option("--output-json", type=click.Path(path_type=Path), default=None, metavar="FILE",
                           help="Write medians, all values, verdicts and their provenance as one JSON file.")


@click.group()
def lab() -> None:
    """Compare engines and memory configurations, with verdicts of known error rate.

    \b
    Examples:
      spill lab list
      spill lab run demo
      spill lab run my-experiment.yaml --dry-run
      spill lab report lab-results/demo --pdf
      spill lab compare before/w1 lab-results/w1
      spill lab publish lab-results
    """


@lab.command("list")
@click.option("--presets", is_flag=True, help="List presets, named configurations of engines, instead.")
def list_experiments(presets: bool) -> None:
    """List the experiments that ship, or presets of engines."""
    from rich.markup import escape

    from spillover.bench.table import make_table

    console = make_console()
    headings: tuple[str, ...]
    if presets:
        from spillover.lab.engines import EngineSpec, missing
        from spillover.lab.presets import PRESETS

        headings = ("preset", "engine", "here?", "what it is")
        table = make_table("Presets: an arm is {preset: NAME, args: {...}}", *headings, text=headings)
        for preset in PRESETS.values():
            spec = EngineSpec(preset.engine, args=preset.args, env=preset.env, preset=preset.name)
            absent = missing(spec)
            table.add_row(preset.name, preset.engine, "yes" if absent is None else escape(absent.install),
                          preset.about)
        console.print(table)
        return
    from spillover.cli.lab.lab_run import duration
    from spillover.lab.document import read_document, shipped
    from spillover.lab.experiment import load_experiment

    headings = ("name", "arms", "workloads", "at most", "sizes", "about")
    table = make_table("Experiments: spill lab run NAME", *headings, text=headings)
    for name in shipped():
        made, document = load_experiment(name), read_document(name)
        table.add_row(name, ", ".join(arm.name for arm in made.arms),
                      ", ".join(dict.fromkeys(workload.group for workload in made.workloads)),
                      duration(made.time_limit),
                      ", ".join(dict.fromkeys(["cpu", *(document.get("scales") or {})])), made.about)
    console.print(table)


@lab.command()
@click.argument("experiment")
@click.option("--scale", default=None, metavar="SIZE", help="Size of the experiment, one that its file defines, such "
                                                           "as gpu. [default: cpu]")
@click.option("--out", default=None, metavar="DIR", help=f"Folder of results; resumed if it holds this experiment. "
                                                         f"[default: {RESULTS}/NAME]")
@click.option("--fresh", is_flag=True, help="Start in a new folder if the default one has results already.")
@click.option("--dry-run", is_flag=True, help="Show what would be run, what would be refused and how long it may take; "
                                             "run nothing.")
@click.option("--max-blocks", type=click.IntRange(min=1), default=None,
              help="Stop after this many blocks even if undecided. [default: the experiment's, or 80]")
@click.option("--time-limit", default=None, metavar="TIME", callback=time_option,
              help="Start no block that would end later than this, such as 30min or 2h; at least 3 blocks are run. "
                   "[default: the experiment's, or 1h]")
@click.option("--arms", default=None, callback=comma_list(click.STRING), metavar="NAME,...",
              help="Run only these arms, and the baseline.")
@click.option("--workloads", default=None, callback=comma_list(click.STRING), metavar="NAME,...",
              help="Run only these workloads.")
@click.option("--model", default=None, help="Model of all arms that name none, in place of the experiment's.")
@click.option("--retry-failed", is_flag=True, help="Repeat runs that failed when the folder was last run.")
@click.option("--monitors/--no-monitors", default=True, show_default=True,
              help="Record GPU, CPU, memory, disk and the engine's metrics during every run.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report at the end.")
@output_json
def run(experiment: str, scale: str | None, out: str | None, fresh: bool, dry_run: bool, max_blocks: int | None,
        time_limit: float | None, arms: tuple[str, ...] | None, workloads: tuple[str, ...] | None, model: str | None,
        retry_failed: bool, monitors: bool, report: bool, output_json: Path | None) -> None:
    """Run EXPERIMENT, a name of `spill lab list` or a YAML file; the same command resumes it.

    An arm is one of the compared configurations. Arms take turns in blocks; every run is checked, and only arms with
    valid runs get verdicts. The experiment ends when every comparison is decided (faster, slower or the same within
    2%), or at a limit.
    """
    from spillover.cli.lab.lab_run import run_in_terminal, show_plan
    from spillover.lab.experiment import load_experiment

    made = load_experiment(experiment, scale, model, max_blocks, arms or (), workloads or (), time_limit)
    console = make_console()
    folder = results_folder(made, out, fresh)
    if dry_run:
        show_plan(console, made, folder)
        return
    run_in_terminal(console, made, folder, monitors, retry_failed)
    _write_json(folder, output_json)
    if report:
        _report(folder)


@lab.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--pdf", is_flag=True, help="Write report.pdf too; needs Chromium, Chrome or Edge.")
@output_json
def report(folder: Path, pdf: bool, output_json: Path | None) -> None:
    """Write the report of FOLDER again, from the results in it."""
    program = _browser() if pdf else None  # fail early, before the results are read
    from spillover.cli.lab.lab_run import show_verdicts
    from spillover.lab.analysis import analyse, analysis_of
    from spillover.lab.store import Results, write_json

    results = Results.open(folder)
    write_json(folder / "analysis.json", analyse(results))
    show_verdicts(make_console(), analysis_of(results))
    _write_json(folder, output_json)
    html = _report(folder)
    if program is not None:
        from spillover.lab.report.pdf import write_pdf

        click.echo(f"PDF: {write_pdf(html, program)}")


lab.add_command(badge)
lab.add_command(compare)
lab.add_command(publish)


@lab.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=9464, show_default=True, help="Port to listen on; 0 picks a free one.")
@click.option("--engine-url", default=None, metavar="URL", help="Also export the /metrics of this server.")
@click.option("--pid", default=None, type=int, help="Also watch the memory of this process and its children.")
def exporter(host: str, port: int, engine_url: str | None, pid: int | None) -> None:
    """Export the lab's monitors to Prometheus, or to Performance Co-Pilot's openmetrics PMDA."""
    from spillover.lab.monitors import CpuMonitor, DiskMonitor, Monitor, NvmlMonitor, ProcessMonitor, PrometheusMonitor
    from spillover.lab.monitors.exporter import Exporter, pcp_instructions

    watched: list[Monitor] = [NvmlMonitor(), CpuMonitor(), DiskMonitor()]
    if pid is not None:
        watched.append(ProcessMonitor(lambda: _family(pid)))
    if engine_url is not None:
        watched.append(PrometheusMonitor(engine_url))
    with Exporter(watched, port, host) as shown:
        click.echo(f"metrics are served at {shown.url}; to let Performance Co-Pilot read them, run:")
        click.echo(pcp_instructions(shown.url))
        for note in shown.notes:
            click.echo(note, err=True)
        shown.wait()


def _family(pid: int) -> tuple[int, ...]:
    import psutil

    try:
        process = psutil.Process(pid)
        return (pid, *(child.pid for child in process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()


def results_folder(made: Experiment, out: str | None = None, fresh: bool = False) -> Path:
    folder = Path(out) if out is not None else Path(RESULTS) / made.name
    if fresh:
        number = 2
        first = folder
        while folder.exists():
            folder = first.with_name(f"{first.name}-{number}")
            number += 1
    return folder


def _write_json(folder: Path, path: Path | None) -> None:
    if path is None:
        return
    from spillover.lab.compare import as_file
    from spillover.lab.store import Results, write_json

    write_json(path, as_file(Results.open(folder)))
    click.echo(f"written to {path}")


def _browser() -> str:
    from spillover.lab.report.pdf import browser

    return browser()


def _report(folder: Path) -> Path:
    from rich.console import Console

    with Console(stderr=True).status("writing the report"):
        from spillover.lab.report import write_report

        written = write_report(folder)
    click.echo(f"report: {written.html}")
    return written.html
