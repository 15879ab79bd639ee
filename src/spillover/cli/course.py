"""`spill course`: sixteen weeks of experiments on serving, with checks, and a book of the results."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.bench.measuring import make_console
from spillover.errors import SpilloverError
from spillover.units import parse_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from spillover.course.runs import CourseRun
    from spillover.course.week import CommandStep, Week

RESULTS = "course-results"
TONES = {"holds": "green", "does not hold": "red", "undecided": "yellow"}
LOG_TAIL = 2_000  # maximum characters of a failed command's output

results_option = click.option("--results", default=RESULTS, show_default=True, metavar="DIR",
                              type=click.Path(path_type=Path), help="Folder of results.")


@click.group()
def course() -> None:
    """Learn how serving works, in sixteen weeks of experiments with tables, plots and checks.

    \b
    Examples:
      spill course list
      spill course show 5
      spill course run 5
      spill course run 5 --scale gpu --sbatch
      spill course run 9 --scale gpu --sbatch --nodes 2
      spill course check 5
      spill course run all
    """


@course.command("list")
@results_option
def list_weeks(results: Path) -> None:
    """List the weeks: title, supported engines, maximum duration, and the outcome of their checks."""
    from spillover.bench.table import make_table
    from spillover.cli.lab.lab_run import duration
    from spillover.course.runs import runs_of
    from spillover.course.shape import check
    from spillover.course.steps import most_seconds
    from spillover.course.week import all_weeks

    headings = ("week", "title", "phase", "engines", "at most", "checks")
    table = make_table("Weeks: spill course run WEEK", *headings, text=headings[1:])
    for week in all_weeks():
        last = runs_of(results, week)[:1]
        outcomes = [outcome.outcome for run in last for outcome in check(run)]
        counts = ", ".join(f"{outcomes.count(word)} {word}" for word in TONES if word in outcomes)
        table.add_row(str(week.number), week.title, week.phase, ", ".join(week.engines),
                      duration(most_seconds(week, "cpu")), counts or "not run")
    make_console().print(table)


@course.command()
@click.argument("week")
def show(week: str) -> None:
    """Show a week: its page, table of metrics, expected shape, and questions."""
    from rich.markdown import Markdown

    from spillover.bench.table import make_table

    console = make_console()
    for each in _weeks(week):
        console.print(Markdown(each.page))
        if each.missing:
            console.print(each.missing, style="yellow", highlight=False, markup=False)
        table = make_table("Metrics", "metric", "what it is", "unit", text=("metric", "what it is", "unit"))
        for row in each.metrics:
            table.add_row(row.name, row.about, row.unit)
        console.print(table)
        lines = [*(f"- {expectation.says}" for expectation in each.expect), "", "## Questions", "",
                 *(f"{index}. {question}" for index, question in enumerate(each.questions, 1)), "",
                 "## What to change next", "", *(f"- {change}" for change in each.next)]
        console.print(Markdown("\n".join(["## Expected shape", "", *lines])))


@course.command()
@click.argument("week")
@click.option("--scale", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="Size: cpu is made for two cores and the default model, gpu is the size of the course's document.")
@click.option("--engine", type=click.Choice(["spillover", "vllm", "sglang"]), default="spillover", show_default=True,
              help="Engine to measure, if the week supports it.")
@click.option("--model", default=None, help="Model of all arms and commands that name none.")
@click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto", show_default=True,
              help="dummy: random weights of the true shape; every number is labelled so.")
@click.option("--gpu-memory", default=None, metavar="SIZE",
              help="Device memory of every server and command; servers then stay up at the same time.")
@click.option("--prompts", type=click.IntRange(1), default=None, metavar="N",
              help="Maximum requests per run, for a quick look at a large size.")
@click.option("--limit", default=None, metavar="TIME",
              help="Time limit of each week, such as 60s: nothing is started after it. Results are kept, and the same "
                   "command continues.")
@click.option("--sbatch", default=None, is_flag=False, flag_value="", metavar="[FILE]",
              help="Write a job file for Slurm and run nothing. [default: weekNN.sbatch]")
@click.option("--nodes", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Nodes of the job, with --sbatch; several become a Ray cluster, with the week's replicas on it.")
@click.option("--ray", is_flag=True,
              help="Run the replicas of arms that have several on a Ray cluster (RAY_ADDRESS, or this machine's).")
@click.option("--dry-run", is_flag=True, help="Show what would be run; run nothing.")
@click.option("--again", is_flag=True, help="Continue experiments that have already stopped; repeat commands.")
@results_option
def run(week: str, scale: str, engine: str, model: str | None, load_format: str, gpu_memory: str | None,
        prompts: int | None, limit: str | None, sbatch: str | None, nodes: int, ray: bool, dry_run: bool, again: bool,
        results: Path) -> None:
    """Run WEEK, a number from 1 to 16, several with commas, or `all`; check it; write the book. Resumes earlier runs.

    \b
    Examples:
      spill course run 7
      spill course run 1 --engine vllm
      spill course run all --scale cpu
      spill course run 1,3,10 --scale gpu --load-format dummy --gpu-memory 30GB --prompts 32 --limit 5min
    """
    from spillover.course.book import write_book
    from spillover.course.runs import CourseRun
    from spillover.course.shape import check as outcomes_of
    from spillover.course.slurm import on_ray
    from spillover.course.steps import arguments, commands, experiments

    chosen = _weeks(week)
    flags = {} if load_format == "auto" else {"load-format": load_format}
    flags |= {} if gpu_memory is None else {"gpu-memory": gpu_memory}
    seconds = math.inf if limit is None else parse_seconds(limit)
    if nodes > 1 and sbatch is None:
        raise SpilloverError("--nodes applies to a job file: give --sbatch too")
    if sbatch is not None:
        if sbatch and len(chosen) > 1:
            raise click.BadParameter("give no FILE with all: every week has a job file of its own")
        for each in chosen:
            _write_job(each, Path(sbatch or f"{each.name}.sbatch"), scale, engine, model, load_format, results, nodes)
        return
    if len(chosen) > 1:
        chosen = [each for each in chosen if engine in each.engines]
    made = {each.number: experiments(each, scale, engine, model, flags, prompts) for each in chosen}  # before any runs
    if ray:
        made = {each.number: on_ray(each, made[each.number]) for each in chosen}
    console = make_console()
    for each in chosen:
        one = CourseRun.of(results, each, scale, engine)
        todo = {step.name: (step, arguments(step, scale, str(one.command_file(step.name)), model, flags, prompts))
                for step in commands(each, scale, engine)}
        _run_week(console, one, made[each.number], todo, time.monotonic() + seconds, dry_run, again)
        if not dry_run:
            write_book(results, results / "book.html")  # after every week, as a later one may be interrupted
    if not dry_run:
        runs = [CourseRun.of(results, each, scale, engine) for each in chosen]
        outcomes = [outcome.outcome for one in runs for outcome in outcomes_of(one)]
        click.echo("checks: " + ", ".join(f"{outcomes.count(word)} {word}" for word in TONES))
        click.echo(f"book: {write_book(results, results / 'book.html')}")


@course.command()
@click.argument("week")
@click.option("--scale", type=click.Choice(["cpu", "gpu"]), default=None, help="Run size. [default: the last run]")
@click.option("--engine", type=click.Choice(["spillover", "vllm", "sglang"]), default=None,
              help="Engine of the run. [default: the last run]")
@results_option
def check(week: str, scale: str | None, engine: str | None, results: Path) -> None:
    """Check the last run of WEEK against the expected shape; exit with code 1 if an expectation does not hold."""
    from spillover.course.runs import runs_of

    console = make_console()
    failed, found = False, False
    chosen = _weeks(week)
    for each in chosen:
        runs = [run for run in runs_of(results, each) if scale in (None, run.scale) and engine in (None, run.engine)]
        found = found or bool(runs)
        for run in runs[:1]:
            failed = _show(console, run) or failed
    if not found:
        raise SpilloverError(f"There are no results of week {week} in {results}; run it with: spill course run {week}")
    if failed:
        sys.exit(1)


@course.command()
@results_option
@click.option("--out", default=None, type=click.Path(path_type=Path), metavar="FILE",
              help="File to write. [default: book.html in the folder of results]")
@click.option("--output-json", default=None, type=click.Path(path_type=Path), metavar="FILE",
              help="Also write weeks, minutes, metrics and checks with their numbers.")
@click.option("--markdown", default=None, type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the checks as a table.")
@click.option("--note", default="", metavar="TEXT", help="Note about the run for the JSON file.")
def report(results: Path, out: Path | None, output_json: Path | None, markdown: Path | None, note: str) -> None:
    """Write the book of all results: one self-contained HTML file that needs no network.

    \b
    Example:
      spill course report --output-json course.json --markdown course.md
    """
    from spillover.course.book import write_book
    from spillover.course.summary import summary, table
    from spillover.course.week import all_weeks
    from spillover.lab.store import write_json

    if output_json is not None or markdown is not None:
        course_summary = summary(results, all_weeks(), note)
        if output_json is not None:
            write_json(output_json, course_summary)
        if markdown is not None:
            markdown.write_text(table(course_summary))
    click.echo(f"book: {write_book(results, out or results / 'book.html')}")


def _weeks(given: str) -> list[Week]:
    from spillover.course.week import WEEKS, all_weeks, load_week

    if given == "all":
        return all_weeks()
    found = []
    for part in given.split(","):
        number = part.strip().lower().removeprefix("week")
        if not number.isdigit():
            raise SpilloverError(f"There is no week '{part}'; give numbers from 1 to {WEEKS}, or all")
        found.append(load_week(int(number)))
    return found


def _run_week(console: Console, one: CourseRun, made: dict[str, Any], todo: dict[str, tuple[CommandStep, list[str]]],
              deadline: float, dry_run: bool, again: bool) -> None:
    from spillover.cli.lab.lab_run import run_in_terminal, show_plan
    from spillover.course.shape import decision_rule
    from spillover.course.steps import clear_disks
    from spillover.lab.report import write_report

    console.rule(f"Week {one.week.number}: {one.week.title}")
    if one.week.missing:
        console.print(one.week.missing, style="yellow", highlight=False, markup=False)
    for step, given in todo.values():
        console.print(f"spill {' '.join(given)}", highlight=False, markup=False)
        if not dry_run and (again or not one.done(step.name)):
            _run_command(console, one, step, given, deadline)
    for name, experiment in made.items():
        folder = one.experiment_folder(name)
        if dry_run:
            show_plan(console, experiment, folder)
        elif again or not one.done(name):
            one.note(name, kind="experiment", done=False)
            if not (folder / "visits").is_dir():
                clear_disks(experiment)
            begun, before = time.monotonic(), one.step_seconds(name)
            try:
                run_in_terminal(console, experiment, folder, monitors=True, stop_rule=decision_rule(one, name),
                                deadline=deadline)
                write_report(folder)
            except SpilloverError as error:  # other steps and weeks continue; the book shows the error
                console.print(str(error), style="red", highlight=False, markup=False)
                one.note(name, reason=str(error), done=False, seconds=before + time.monotonic() - begun)
                continue
            cut = time.monotonic() >= deadline  # an interrupted step is resumed by the same command
            one.note(name, done=not cut, reason=None, seconds=before + time.monotonic() - begun)
    if not dry_run:
        one.note()
        _show(console, one)


def _run_command(console: Console, one: CourseRun, step: CommandStep, given: list[str], deadline: float) -> None:
    from spillover.lab.engines.spillover import spill

    one.command_file(step.name).unlink(missing_ok=True)
    one.note(step.name, kind="command", done=False)
    begun, why = time.monotonic(), None
    most = max(0.0, min(step.seconds, deadline - begun))
    with console.status(f"{step.name}, at most {most:.0f} s"):
        try:
            done = subprocess.run([*spill(sys.executable), *given], capture_output=True, text=True, check=False,
                                  timeout=most)
            if done.returncode:
                lines = done.stderr.strip()[-LOG_TAIL:].splitlines()
                why = lines[-1] if lines else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it took more than {most:.0f} s" if most else "the time limit (--limit) had passed"
    if why is not None:
        console.print(f"{step.name}: {why}", style="red", highlight=False, markup=False)
    one.note(step.name, done=why is None, reason=why, seconds=time.monotonic() - begun)


def _show(console: Console, run: CourseRun) -> bool:
    """Print the table of metrics and the outcomes of a run; return whether an expectation does not hold."""
    from rich.markup import escape

    from spillover.bench.table import make_table
    from spillover.course.shape import FAILS
    from spillover.course.shape import check as outcomes_of
    from spillover.course.tables import filled_rows, number

    headings = ("metric", "unit", "of", "on", "median")
    table = make_table(f"Week {run.week.number}, size {run.scale}, {run.engine}", *headings, text=headings[:4])
    notes: dict[str, str] = {}
    for filled in filled_rows(run):
        for index, (name, column, cell) in enumerate((name, column, cell) for name, cells in filled.rows
                                                     for column, cell in zip(filled.columns, cells, strict=True)
                                                     if cell is not None):
            table.add_row(escape(filled.row.name) if not index else "", filled.row.unit, escape(name), escape(column),
                          "-" if cell.median is None else number(cell.median))
        if not filled.rows:
            table.add_row(escape(filled.row.name), filled.row.unit, "", "", "-")
        notes |= dict.fromkeys(filled.notes, filled.row.name)
    console.print(table)
    for note, name in notes.items():
        console.print(f"{name}: {note}", highlight=False, markup=False)
    outcomes = outcomes_of(run)
    for outcome in outcomes:
        console.print(f"{outcome.outcome}: {outcome.expectation.says} {outcome.text}", style=TONES[outcome.outcome],
                      highlight=False, markup=False)
    return any(outcome.outcome == FAILS for outcome in outcomes)


def _write_job(week: Week, path: Path, scale: str, engine: str, model: str | None, load_format: str,
               results: Path, nodes: int) -> None:
    import shlex

    from spillover.course.slurm import job_file, on_ray
    from spillover.course.steps import experiments

    if nodes > 1:
        on_ray(week, experiments(week, scale, model=model))  # raises if the week has no replicas
    command = ["spill", "course", "run", str(week.number), "--scale", scale]
    command += [] if engine == "spillover" else ["--engine", engine]
    command += [] if model is None else ["--model", model]
    command += [] if load_format == "auto" else ["--load-format", load_format]
    command += [] if str(results) == RESULTS else ["--results", str(results)]
    command += [] if nodes == 1 else ["--ray"]
    path.write_text(job_file(week, scale, shlex.join(command), nodes))
    click.echo(f"job file: {path}; submit it with: sbatch {path}")
