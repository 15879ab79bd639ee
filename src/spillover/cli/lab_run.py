"""An experiment in a terminal: what is planned, how it goes, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spillover.errors import SpilloverError
from spillover.lab.analysis import analysis_of
from spillover.lab.engines import EngineSpec
from spillover.lab.experiment import Arm, Experiment
from spillover.lab.run import Bench, Watcher, run_experiment
from spillover.lab.schedule import Visit, turns, visits
from spillover.lab.traffic import Progress as Figures
from spillover.lab.traffic import ServedLoad
from spillover.lab.verdict import FASTER, NO_VERDICT, SLOWER

if TYPE_CHECKING:
    from spillover.bench.load import Live
    from spillover.bench.target import Limits
    from spillover.lab.limits import LimitsOf
    from spillover.plan.rates import Rates

COLOURS = {FASTER: "green", SLOWER: "red", NO_VERDICT: "yellow"}


def run_in_terminal(console: Console, experiment: Experiment, folder: Path, monitors: bool,
                    retry_failed: bool = False) -> None:
    from spillover.bench.provenance import provenance
    from spillover.lab.watch import Monitored
    from spillover.plan.hardware import probe

    load = ServedLoad(experiment)
    for workload in experiment.workloads:
        load.check(workload)  # before anything is measured or fetched
    if retry_failed:
        forget_failed(folder)
    planned = len(visits(experiment))
    console.print(f"{experiment.name}: {planned} runs of {len(experiment.arms)} arms into {folder}", highlight=False)
    bench = Bench(load, limits_of=limits_of(experiment, console),
                  watch=Monitored(lambda note: console.print(f"not watched: {note}", highlight=False)) if monitors
                  else None)
    with Shown(console, planned) as watcher:
        results = run_experiment(experiment, folder, bench, watcher, provenance(dataclasses.asdict(probe())))
    show_verdicts(console, analysis_of(results))


class Shown(Watcher):
    """A bar with the figures of the run under way; one line for each that has ended."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                             TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
                             console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=total, figures="")

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def arm_skipped(self, arm: Arm, why: str) -> None:
        self._console.print(f"{arm.name}: {why}", style="yellow", highlight=False, markup=False)

    def visit_begins(self, visit: Visit, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, description=f"{visit.workload}: {visit.arm}",
                         figures="")

    def live(self) -> Figures:
        return self._figures

    def _figures(self, live: Live) -> None:
        rate = live.output_tokens / live.seconds if live.seconds > 0 else 0.0
        self._bar.update(self._task, figures=f"{live.completed}/{live.total} requests, {rate:.0f} tok/s")

    def visit_ends(self, visit: Visit, told: Mapping[str, Any]) -> None:
        self._bar.advance(self._task)
        text, style = _line(told)
        self._console.print(f"pass {visit.pass_ + 1}, {visit.workload}, {visit.arm}: {text}", style=style,
                            highlight=False, markup=False)


def _line(told: Mapping[str, Any]) -> tuple[str, str | None]:
    if told["status"] != "ok":
        return str(told["reason"]), "red"
    metrics = told["metrics"]
    shown = [f"{metrics[name]:.{digits}f} {unit}" for name, digits, unit in
             (("output_throughput", 1, "tok/s"), ("median_ttft_ms", 0, "ms TTFT"), ("median_tpot_ms", 1, "ms TPOT"))
             if metrics.get(name) is not None]
    faults = [fault["reason"] for fault in told["faults"] if fault["fatal"]]
    return ", ".join(shown) + "".join(f"; not valid: {reason}" for reason in faults), "yellow" if faults else None


def show_verdicts(console: Console, analysis: Mapping[str, Any]) -> None:
    if not analysis["complete"]:
        console.print(f"{analysis['visits_done']} of {analysis['visits_planned']} runs are done; the same command goes "
                      "on with the rest", style="yellow", highlight=False)
    for verdict in analysis["verdicts"]:
        if verdict["primary"]:
            console.print(verdict["text"], style=COLOURS.get(verdict["verdict"]), highlight=False, markup=False)
    for cell in analysis["cells"]:
        for fault in cell["faults"]:
            console.print(f"{cell['arm']} on {cell['workload']}, {len(fault['visits'])} runs: {fault['reason']}",
                          style="yellow", highlight=False, markup=False)


def show_plan(console: Console, experiment: Experiment) -> None:
    """What would be run: arms with their commands, workloads with their sizes, and the order."""
    from spillover.bench.make_workload import make_workload
    from spillover.bench.workload_options import WorkloadOptions
    from spillover.lab.engines import make_engine, missing
    from spillover.lab.traffic import workload_part

    load = ServedLoad(experiment)
    for workload in experiment.workloads:
        load.check(workload)
    arms = Table(title=f"{experiment.name}: arms, baseline {experiment.baseline}", title_justify="left")
    for heading in ("arm", "command, or what is missing"):
        arms.add_column(heading, overflow="fold")
    for arm in experiment.arms:
        absent = missing(arm.spec)
        command = shlex.join(make_engine(arm.spec).command(0)) or arm.spec.url or ""
        arms.add_row(escape(arm.name), escape(command if absent is None else str(absent)))
    console.print(arms)
    loads = Table(title="Workloads of one run", title_justify="left")
    for heading in ("workload", "requests", "prompt tokens", "output tokens", "shared", "working set", "must spill"):
        loads.add_column(heading, justify="left" if heading == "workload" else "right")
    for workload in experiment.workloads:
        stats = make_workload(WorkloadOptions.from_mapping(workload_part(workload.options)), None).stats()
        loads.add_row(workload.name, f"{stats.count:,}", f"{stats.prompt.total:,}", f"{stats.output.total:,}",
                      f"{stats.sharing:.0%}", f"{stats.working_set_tokens:,}", "yes" if workload.offload else "")
    console.print(loads)
    planned = visits(experiment)
    starts = len(turns(planned)) if experiment.restart == "per-visit" else len(experiment.arms)
    first = [f"{visit.workload}:{visit.arm}" for visit in planned if visit.block == 0]
    console.print(f"{len(planned)} runs in {experiment.repeats} blocks, {starts} starts of servers. "
                  f"First block: {' '.join(first)}", highlight=False)
    console.print(f"Decides: {experiment.primary} at {experiment.confidence:.0%}, Holm over "
                  f"{(len(experiment.arms) - 1) * len(experiment.workloads)} comparisons; a verdict takes "
                  f"{experiment.minimum_blocks} blocks.", highlight=False)


def forget_failed(folder: Path) -> None:
    from spillover.lab.store import Results

    if (folder / "experiment.json").exists():
        for visit in Results.open(folder).visits:
            if visit["status"] == "failed":
                (folder / "visits" / f"{visit['key']}.json").unlink()


def limits_of(experiment: Experiment, console: Console) -> LimitsOf:
    """Of spillover's arms, whose model and number format are known; measured before the first server starts, so that
    nothing runs beside it."""
    found: dict[str, Limits] = {}
    rates: dict[str, Rates] = {}
    for arm in experiment.arms:
        if arm.spec.kind == "spillover" and arm.spec.python is None:
            with contextlib.suppress(SpilloverError), console.status("measuring what this machine allows"):
                found[_key(arm.spec)] = _limits(arm.spec, rates)  # what is wrong with the arm it will say itself
    return lambda spec: found.get(_key(spec))


def _key(spec: EngineSpec) -> str:
    return repr(spec.to_json())


def _limits(spec: EngineSpec, rates: dict[str, Rates]) -> Limits:
    from spillover.cli.loading import look_at
    from spillover.cli.targets import RooflineLimits
    from spillover.engine.config import EngineConfig
    from spillover.plan.measure import measure_rates
    from spillover.plan.roofline import Roofline
    from spillover.plan.shapes import model_shape

    names = {item.name for item in dataclasses.fields(EngineConfig)}
    given = {name.replace("-", "_"): value for name, value in spec.args.items()}
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in names}
    planned = look_at(EngineConfig.from_flags(**{**flags, "model": spec.model}))
    shape = model_shape(planned.model_config, planned.specs, planned.plan.dtype, kv_dtype=planned.plan.kv_cache_dtype)
    device = planned.plan.device
    if device not in rates:
        rates[device] = measure_rates(device)
    return RooflineLimits(Roofline(shape, rates[device]))
