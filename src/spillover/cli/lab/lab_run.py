"""An experiment in a terminal: its plan, its progress, and its verdicts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from spillover.bench.table import make_table
from spillover.errors import SpilloverError
from spillover.lab.analysis import Stop, analysis_of
from spillover.lab.engines import EngineSpec, with_path
from spillover.lab.experiment import Arm, Experiment
from spillover.lab.preflight import foreseen, sending_seconds, workload_stats
from spillover.lab.run import Bench, StopRule, Watcher, run_experiment
from spillover.lab.schedule import Visit, turns, visits
from spillover.lab.traffic import Progress as Figures
from spillover.lab.traffic import ServedLoad
from spillover.lab.verdict import FASTER, NO_VERDICT, SAME, SLOWER

if TYPE_CHECKING:
    from spillover.bench.serving.load import Live
    from spillover.bench.target import Limits
    from spillover.bench.workloads.workload_stats import WorkloadStats
    from spillover.lab.limits import LimitsOf
    from spillover.plan.rates import Rates

COLOURS = {FASTER: "green", SLOWER: "red", SAME: "cyan", NO_VERDICT: "yellow"}


def run_in_terminal(console: Console, experiment: Experiment, folder: Path, monitors: bool,
                    retry_failed: bool = False, stop_rule: StopRule | None = None,
                    deadline: float = math.inf) -> None:
    from spillover.bench.provenance import provenance
    from spillover.lab.watch import Monitored
    from spillover.plan.hardware import probe

    load = ServedLoad(experiment)
    for workload in experiment.workloads:
        load.check(workload)  # before anything is measured or downloaded
    show_foreseen(console, foreseen(experiment, workload_stats(experiment)))
    if retry_failed:
        forget_failed(folder)
    console.print(f"{experiment.name}: {len(experiment.arms)} arms into {folder}, until decided; at most "
                  f"{experiment.max_blocks} blocks or {duration(experiment.time_limit)}", highlight=False)
    bench = Bench(load, limits_of=limits_of(experiment, console),
                  watch=Monitored(lambda note: console.print(f"monitoring off: {note}", highlight=False)) if monitors
                  else None)
    with Shown(console, experiment) as watcher:
        results = run_experiment(experiment, folder, bench, watcher, provenance(dataclasses.asdict(probe())),
                                 stop_rule, deadline)
    show_verdicts(console, analysis_of(results))


class Shown(Watcher):
    """A watcher that shows progress and the estimated time left: a bar over the runs of a block, a line for each
    completed run and block, and a countdown while waiting for a server."""

    def __init__(self, console: Console, experiment: Experiment) -> None:
        self._console, self._experiment = console, experiment
        self._begun = time.monotonic()
        self._left = ""  # text with the last estimate of the time left
        self._waited: set[str] = set()  # arms whose first start has been reported
        self._seconds: list[float] = []  # duration of each block
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                             TimeElapsedColumn(), _CountDown(), TextColumn("{task.fields[figures]}"),
                             console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None, figures="", deadline=None)

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def arm_skipped(self, arm: Arm, why: str) -> None:
        self._print(f"{arm.name}: {why}", "yellow")

    def arm_failed(self, arm: Arm, why: str) -> None:
        self._print(f"{arm.name} cannot be started and is left out: {why}", "red")

    def starting(self, arm: Arm) -> None:
        what = f"waiting for {arm.spec.url} to answer" if arm.spec.kind == "url" else f"starting {arm.name}"
        if arm.name not in self._waited:
            self._waited.add(arm.name)
            self._print(f"{what}, at most {duration(arm.spec.ready_seconds)}")
        self._bar.update(self._task, description=what, figures="", deadline=time.monotonic() + arm.spec.ready_seconds)

    def block_begins(self, block: int, runs: int) -> None:
        self._block = block + 1
        self._bar.update(self._task, completed=0, total=runs)

    def visit_begins(self, visit: Visit) -> None:
        self._bar.update(self._task, description=f"block {visit.block + 1}, {visit.workload}: {visit.arm}",
                         figures=self._left, deadline=None)

    def live(self) -> Figures:
        return self._figures

    def _figures(self, live: Live) -> None:
        rate = live.output_tokens / live.seconds if live.seconds > 0 else 0.0
        figures = f"{live.completed}/{live.total} requests, {rate:.0f} tokens/s"
        self._bar.update(self._task, figures=f"{figures}; {self._left}" if self._left else figures)

    def visit_ends(self, visit: Visit, record: Mapping[str, Any]) -> None:
        self._bar.advance(self._task)
        text, style = _line(record)
        self._print(f"block {visit.block + 1}, {visit.workload}, {visit.arm}: {text}", style)

    def block_ends(self, found: Stop, seconds: float) -> None:
        self._seconds.append(seconds)
        decided = len(found.verdicts) - len(found.undecided)
        text = f"block {self._block} took {duration(seconds)}; {decided} of {len(found.verdicts)} comparisons decided"
        if found.reason is None:
            left = self._eta(found)
            self._left = left
            text += f"; {left}"
        self._print(text)

    def _eta(self, found: Stop) -> str:
        """Estimate the time left from the blocks so far and the limits."""
        blocks = max((verdict.blocks_left(self._experiment.max_blocks) for verdict in found.undecided), default=0)
        blocks = max(1, blocks, self._experiment.minimum_blocks - found.blocks)
        least = self._experiment.rule.least_blocks(len(found.verdicts))
        each = sum(self._seconds) / len(self._seconds)
        limit = max(0.0, self._experiment.time_limit - (time.monotonic() - self._begun))
        most = min(limit, each * (self._experiment.max_blocks - found.blocks))
        if found.blocks < least - 1:  # the spread of the blocks is not known well enough
            return f"at least {duration(each * (least - found.blocks))}, at most {duration(most)} left"
        return f"about {duration(min(each * blocks, most))} left, at most {duration(most)}"

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, highlight=False, markup=False)


class _CountDown(ProgressColumn):
    """The seconds that a server has left to become ready."""

    def render(self, task: Task) -> Text:
        deadline = task.fields.get("deadline")
        return Text("" if deadline is None else f"{max(0.0, deadline - time.monotonic()):.0f} s left")


def duration(seconds: float) -> str:
    """Format seconds: '45 s', '12 min', '2 h 5 min'."""
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h" + (f" {rest} min" if rest else "")


def _line(record: Mapping[str, Any]) -> tuple[str, str | None]:
    if record["status"] != "ok":
        return str(record["reason"]), "red"
    metrics = record["metrics"]
    shown = [f"{metrics[name]:.{digits}f} {unit}" for name, digits, unit in
             (("output_throughput", 1, "tokens/s"), ("median_ttft_ms", 0, "ms TTFT"), ("median_tpot_ms", 1, "ms TPOT"))
             if metrics.get(name) is not None]
    faults = [fault["reason"] for fault in record["faults"] if fault["fatal"]]
    return ", ".join(shown) + "".join(f"; not valid: {reason}" for reason in faults), "yellow" if faults else None


def show_verdicts(console: Console, analysis: Mapping[str, Any]) -> None:
    console.print(analysis["stopped"]["text"], style=None if analysis["stopped"]["reason"] == "decided" else "yellow",
                  highlight=False, markup=False)
    for verdict in analysis["verdicts"]:
        if verdict["primary"]:
            console.print(verdict["text"], style=COLOURS.get(verdict["verdict"]), highlight=False, markup=False)
    for cell in analysis["cells"]:
        for fault in cell["faults"]:
            console.print(f"{cell['arm']} on {cell['workload']}, {len(fault['visits'])} runs: {fault['reason']}",
                          style="yellow", highlight=False, markup=False)


def show_foreseen(console: Console, faults: Sequence[str]) -> None:
    for fault in faults:
        console.print(f"There will be no verdict: {fault}", style="yellow", highlight=False, markup=False)


def show_plan(console: Console, experiment: Experiment, folder: Path) -> None:
    """Show what would be run: arms with their commands, workloads with their sizes, the order, foreseen faults and the
    duration. Nothing is started; servers given by URL are queried once."""
    from spillover.lab.engines import make_engine, missing
    from spillover.lab.engines.process import status_of

    load = ServedLoad(experiment)
    for workload in experiment.workloads:
        load.check(workload)
    headings = ("arm", "command, or what is missing")
    arms = make_table(f"{experiment.name}: arms, baseline {experiment.baseline}", *headings, text=headings)
    for arm in experiment.arms:
        absent = missing(arm.spec)
        command = shlex.join(make_engine(arm.spec).command(0)) if absent is None else str(absent)
        if arm.spec.url is not None:
            answers = status_of(f"{arm.spec.url.rstrip('/').removesuffix('/v1')}/v1/models", timeout=2.0)
            command = f"{arm.spec.url} ({'answers' if answers == 200 else 'does not answer now'})"
        arms.add_row(escape(arm.name), escape(command))
    console.print(arms)
    stats = workload_stats(experiment)
    loads = make_table("Workloads, per run", "workload", "requests", "prompt tokens", "output tokens", "shared",
                       "working set", "must spill")
    for workload in experiment.workloads:
        found = stats[workload.name]
        loads.add_row(workload.name, f"{found.count:,}", f"{found.prompt.total:,}", f"{found.output.total:,}",
                      f"{found.sharing:.0%}", f"{found.working_set_tokens:,}", "yes" if workload.offload else "")
    console.print(loads)
    show_foreseen(console, foreseen(experiment, stats))
    for sentence in _plan_sentences(experiment, stats, folder):
        console.print(sentence, highlight=False, markup=False)


def _plan_sentences(experiment: Experiment, stats: Mapping[str, WorkloadStats], folder: Path) -> Iterator[str]:
    block = [visit for visit in visits(experiment) if visit.block == 0]
    ours = {arm.name for arm in experiment.arms if arm.spec.kind != "url"}
    starts = sum(turn.arm in ours for turn in turns(block)) if experiment.restart == "per-visit" else 0
    yield (f"A block is {len(block)} runs" + (f" and {starts} starts of servers" if starts else "") + ": "
           + " ".join(f"{visit.workload}:{visit.arm}" for visit in block))
    if ours:
        yield f"Before the first block each of {len(ours)} servers is started once, to check that it can be"
    comparisons = (len(experiment.arms) - 1) * len(experiment.workloads)
    least = experiment.rule.least_blocks(comparisons)
    yield (f"It runs until each of {comparisons} comparisons by {experiment.primary} is faster, slower or the same "
           f"within {100 * experiment.equivalence:g}%, at {experiment.confidence:.4g} confidence for all together: "
           f"at least {least} blocks, at most {experiment.max_blocks} blocks or {duration(experiment.time_limit)}")
    known = [sending_seconds(workload, stats[workload.name]) for workload in experiment.workloads]
    sending = sum(seconds or 0.0 for seconds in known) * len(block) / len(experiment.workloads)
    seen = _seconds_per_block(folder, len(block))
    if seen is not None:
        yield f"A block took {duration(seen)} in {folder}: at least {duration(seen * least)} in all"
    elif sending:
        yield (f"Sending requests at the rates given takes {duration(sending)} per block, at least "
               f"{duration(sending * least)} in all")
    else:
        yield "The time that a block takes is printed after the first one"


def _seconds_per_block(folder: Path, runs: int) -> float | None:
    """Return the mean duration of a block in an existing result folder; None if it has none."""
    from spillover.lab.store import Results

    if not (folder / "experiment.json").exists():
        return None
    seconds = [visit["seconds"] for visit in Results.open(folder).visits if visit.get("seconds")]
    return runs * sum(seconds) / len(seconds) if seconds else None


def forget_failed(folder: Path) -> None:
    from spillover.lab.store import Results

    if (folder / "experiment.json").exists():
        for visit in Results.open(folder).visits:
            if visit["status"] == "failed":
                (folder / "visits" / f"{visit['key']}.json").unlink()


def limits_of(experiment: Experiment, console: Console) -> LimitsOf:
    """Compute the limits of spillover's arms, whose model and number format are known. Measures before the first server
    starts, so that nothing else runs."""
    found: dict[str, Limits] = {}
    rates: dict[str, Rates] = {}
    for arm in experiment.arms:
        if arm.spec.kind in ("spillover", "in-process") and arm.spec.python is None:
            with contextlib.suppress(SpilloverError), console.status("measuring the rates of this machine"):
                found[_key(arm.spec)] = _limits(arm.spec, rates)  # the arm reports its own errors when it starts
    return lambda spec: found.get(_key(spec))


def _key(spec: EngineSpec) -> str:
    return repr(spec.to_json())


def _limits(spec: EngineSpec, rates: dict[str, Rates]) -> Limits:
    from spillover.cli.bench.targets import RooflineLimits
    from spillover.cli.loading import plan_only
    from spillover.engine.config import EngineConfig
    from spillover.plan.measure import measure_rates
    from spillover.plan.roofline import Roofline
    from spillover.plan.shapes import model_shape

    names = {item.name for item in dataclasses.fields(EngineConfig)}
    given = {name.replace("-", "_"): value for name, value in spec.args.items()}
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in names}
    planned = plan_only(EngineConfig.from_flags(**{**flags, "model": with_path(spec).model}))
    shape = model_shape(planned.model_config, planned.specs, planned.plan.dtype, kv_dtype=planned.plan.kv_cache_dtype)
    device = planned.plan.device
    if device not in rates:
        rates[device] = measure_rates(device)
    return RooflineLimits(Roofline(shape, rates[device]))
