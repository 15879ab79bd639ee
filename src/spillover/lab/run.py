"""Execution of an experiment: block after block until it is decided; every run is saved as it completes.

    start every arm once; then for each block, until a limit or a decision:
        for turn in turns(block): start the arm's server, then for each visit: warm up, reset, measure, judge, write

A server that is missing, does not start, crashes or runs out of memory is a result of its arm, and the others continue.
Only a baseline that does not start, or a URL that does not answer, ends the experiment before its first run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from spillover.bench.serving.rank_counters import rank_metrics
from spillover.bench.serving.speculation_counters import speculation_metrics
from spillover.bench.target import PHASES
from spillover.errors import SpilloverError
from spillover.lab import engines
from spillover.lab.accuracy import Evaluate, evaluate
from spillover.lab.analysis import Stop, analyse, stop
from spillover.lab.engines import CacheReset, Engine, EngineFailed, EngineSpec, Missing, make_engine
from spillover.lab.experiment import Arm, Experiment
from spillover.lab.limits import LimitsOf, reached
from spillover.lab.schedule import Turn, Visit, turns, visits
from spillover.lab.store import ResultFolder, Results
from spillover.lab.traffic import Load, Measured, Progress, ServedLoad
from spillover.lab.validity import Fault, Sample, cache_hits, judge

GIVE_UP = 2  # consecutive failures of an arm on a workload after which its other visits there are skipped
ATTEMPT_PROMPTS = 1_000_000  # added to a visit's repeat per attempt, for prompts that no other run has
SETTLE_SECONDS = 0.2  # seconds between a reset and a run, in which threads that are still spinning stop

# Whether a question of the caller about an experiment is decided by the results so far.
StopRule = Callable[[Results], bool]

# Runs monitors during one visit and writes to the given file; tests pass their own.
Watch = Callable[[Engine, Path], AbstractContextManager[None]]


class Watcher:
    """An observer of the experiment's progress. Does nothing by default."""

    def arm_skipped(self, arm: Arm, why: str) -> None: ...

    def starting(self, arm: Arm) -> None:
        """Note that an arm's server is waited for, until it is ready or `arm.spec.ready_seconds` have passed."""

    def arm_failed(self, arm: Arm, why: str) -> None:
        """Note that an arm could not be started before the first run."""

    def block_begins(self, block: int, runs: int) -> None: ...

    def visit_begins(self, visit: Visit) -> None: ...

    def live(self) -> Progress | None:
        """Return a progress callback for the next run; None for none."""
        return None

    def visit_ends(self, visit: Visit, record: Mapping[str, Any]) -> None: ...

    def block_ends(self, found: Stop, seconds: float) -> None:
        """Note the end of a block. `found`: what is decided so far; `seconds`: the duration of the block."""


@dataclass(frozen=True)
class Bench:
    """The components that the lab uses; tests replace some."""

    load: Load
    make: Callable[[EngineSpec, Path | None], Engine] = make_engine
    missing: Callable[[EngineSpec], Missing | None] = engines.missing
    limits_of: LimitsOf = lambda spec: None
    watch: Watch | None = None
    evaluate: Evaluate = evaluate
    settle_seconds: float = SETTLE_SECONDS


def run_experiment(experiment: Experiment, path: Path, bench: Bench | None = None, watcher: Watcher | None = None,
                   session: Mapping[str, Any] | None = None, stop_rule: StopRule | None = None,
                   deadline: float = math.inf) -> Results:
    """Run an experiment until it is decided or at a limit. The same call resumes, with a new time limit. If `answered`
    is given, it decides when to stop instead of the experiment's own verdicts. After `deadline`, a time of the
    monotonic clock, no server and no run is started, even if the minimum of blocks is not reached."""
    bench = bench or Bench(ServedLoad(experiment))
    for workload in experiment.workloads:
        for arm in experiment.arms:
            bench.load.check(experiment.workload(workload.name, arm.name))
    folder = ResultFolder.open(path, experiment)
    folder.begin(session or {})
    try:
        folder.end(_Runner(experiment, folder, bench, watcher or Watcher(), stop_rule, deadline).run())
    finally:
        results = Results.open(path)
        folder.write_analysis(analyse(results))
    return results


@dataclass(frozen=True)
class _VisitResult:
    """A visit with its measurements."""

    visit: Visit
    measured: Measured
    repeat: int
    warmups: int
    cache_reset: CacheReset
    pool: int | None  # tokens of KV that the device holds; None if unknown
    monitors: Path  # where monitors write, if any
    faults: tuple[Fault, ...] = ()
    retried_faults: tuple[Fault, ...] = ()  # faults of earlier attempts, for which the run was repeated


class _DeadlineError(Exception):
    """Raised after the deadline: saved results stay, and nothing more is started."""


class _Runner:
    def __init__(self, experiment: Experiment, folder: ResultFolder, bench: Bench, watcher: Watcher,
                 stop_rule: StopRule | None, deadline: float) -> None:
        self._experiment, self._folder, self._bench, self._watcher = experiment, folder, bench, watcher
        self._stop_rule, self._deadline = stop_rule, deadline
        self._planned = visits(experiment)
        self._failures: dict[tuple[str, str], int] = {}  # consecutive failures by arm and workload
        self._open: dict[str, Engine] = {}
        self._start_failures: dict[str, EngineFailed] = {}  # arms that could not be started before the first run

    def run(self) -> str | None:
        """Run the experiment; return why it stopped, None if every block was run."""
        skipped = self._skip_missing()
        begun = time.monotonic()
        longest = 0.0  # seconds of the longest block of this session
        found = self._stop()
        with ExitStack() as stack:
            stack.callback(self._close_all)
            for block, planned in groupby(self._planned, key=lambda visit: visit.block):
                left = [visit for visit in planned if visit.arm not in skipped and not self._folder.done(visit)]
                if not left:
                    continue
                if found.reason in ("decided", "answered"):
                    return found.reason
                late = time.monotonic() - begun + longest > self._experiment.time_limit
                if late and found.blocks >= self._experiment.minimum_blocks:
                    return "time-limit"
                try:
                    if not longest:
                        self._try_all(skipped, left[0].arm)
                        self._evaluate_all(skipped)
                    since = time.monotonic()
                    self._watcher.block_begins(block, len(left))
                    for turn in turns(left):
                        self._run_turn(turn)
                except _DeadlineError:
                    return "time-limit"
                seconds = time.monotonic() - since
                longest = max(longest, seconds)
                found = self._stop()
                self._watcher.block_ends(found, seconds)
        return None

    def _stop(self) -> Stop:
        """Return what is decided so far. A caller's question replaces the lab's own rule, from the experiment's minimum
        number of blocks on."""
        results = Results.open(self._folder.path)
        found = stop(results)
        if self._stop_rule is None or not found.blocks:
            return found
        if found.blocks >= self._experiment.minimum_blocks and self._stop_rule(results):
            return replace(found, reason="answered")
        return replace(found, reason=None)

    def _try_all(self, skipped: set[str], first: str) -> None:
        """Start every arm once, so that arms that cannot start are known before anything is measured. Servers that stay
        up are kept running, and so is that of `first`, whose turn is next."""
        arms = [arm for arm in self._experiment.arms if arm.name not in skipped]
        for arm in sorted(arms, key=lambda arm: arm.name == first):
            try:
                self._engine(arm.name, "start")
            except EngineFailed as failure:
                if arm.name == self._experiment.baseline or arm.spec.kind == "url":
                    role = "baseline" if arm.name == self._experiment.baseline else "arm"
                    raise SpilloverError(f"{role} '{arm.name}' cannot be measured: {_why(failure)}") from failure
                self._start_failures[arm.name] = failure
                self._not_started(arm.name, failure)
                self._watcher.arm_failed(arm, _why(failure))
                continue
            if self._experiment.restart == "per-visit" and arm.name != first:
                self._close(arm.name)

    def _evaluate_all(self, skipped: set[str]) -> None:
        """Evaluate every arm's model on its server, the baseline's first; results in the folder are not repeated."""
        spec, folder = self._experiment.eval, self._folder
        if spec is None:
            return
        reference = ""
        for arm in sorted(self._experiment.arms, key=lambda arm: arm.name != self._experiment.baseline):
            if arm.name in skipped or arm.name in self._start_failures:
                continue
            if folder.evaluated(arm.name) is not None:
                reference = reference or folder.evaluated(arm.name)["reference"]
                continue
            kept, found, why = arm.name in self._open, {}, None
            try:
                url = self._engine(arm.name, "eval").running.url
                reference = reference or url
                found = dict(self._bench.evaluate(spec, url, reference, folder.path / "reference"))
            except SpilloverError as error:  # an arm without an accuracy is still timed
                why = str(error)
            folder.write_eval(arm.name, {"reference": reference, "scores": found, "reason": why})
            if not kept and self._experiment.restart == "per-visit" and arm.name in self._open:
                self._close(arm.name)

    def _skip_missing(self) -> set[str]:
        """Skip arms whose engine is missing. Their visits are not written, so that resuming runs them."""
        skipped = set()
        for arm in self._experiment.arms:
            missing = self._bench.missing(arm.spec)
            if missing is None:
                self._folder.unskip(arm.name)
            else:
                skipped.add(arm.name)
                self._folder.write_arm(arm.name, {"status": "skipped", "reason": missing.reason,
                                                  "install": missing.install})
                self._watcher.arm_skipped(arm, str(missing))
        return skipped

    def _run_turn(self, turn: Turn) -> None:
        left = [visit for visit in turn.visits if not self._gave_up(visit)]
        while left:
            begun = time.time()
            self._check_deadline()
            try:
                if turn.arm in self._start_failures:
                    raise self._start_failures[turn.arm]
                engine = self._engine(turn.arm, turn.log_name)
            except EngineFailed as failure:
                self._not_started(turn.arm, failure)
                for visit in left:
                    self._fail(visit, failure, begun)
                return
            self._visit(left.pop(0), engine)
        if self._experiment.restart == "per-visit" and turn.arm in self._open:
            self._close(turn.arm)

    def _visit(self, visit: Visit, engine: Engine) -> None:
        begun = time.time()
        self._watcher.visit_begins(visit)
        result = None
        try:
            result = self._measure(visit, engine)
            engine.check()
            record = self._visit_record(engine, result)
        except SpilloverError as error:
            self._close(visit.arm)  # the next visit gets a new server
            if visit.index == 0 and not isinstance(error, EngineFailed):
                raise  # nothing is measured yet: the user can still correct the experiment
            # A feature that a server lacks, or a workload that it cannot run, fails its own arm only.
            failure = error if isinstance(error, EngineFailed) else EngineFailed("refused", str(error))
            self._fail(visit, failure, begun, result)
            return
        self._failures[visit.arm, visit.workload] = 0
        self._end(visit, {**record, "started": begun, "seconds": time.time() - begun}, result)

    def _gave_up(self, visit: Visit) -> bool:
        if self._failures.get((visit.arm, visit.workload), 0) < GIVE_UP:
            return False
        self._end(visit, {"status": "failed", "reason": f"left out: it had failed {GIVE_UP} times in a row",
                          "metrics": {}, "faults": []})
        return True

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            raise _DeadlineError

    def _not_started(self, arm: str, failure: EngineFailed) -> None:
        self._folder.write_arm(arm, {"status": "failed", "reason": _why(failure), "install": None,
                                     "log_tail": failure.log_tail})

    def _engine(self, name: str, log_name: str) -> Engine:
        """Return an arm's engine, already running or started now. One that died while idle is restarted: each visit
        judges its own server."""
        if name in self._open:
            try:
                self._open[name].check()
                return self._open[name]
            except EngineFailed:
                self._close(name)
        self._check_deadline()
        arm = self._experiment.arm(name)
        engine = self._bench.make(arm.spec, self._folder.log_folder(log_name))
        self._watcher.starting(arm)
        running = engine.start()
        self._open[name] = engine
        self._folder.write_arm(arm.name, {
            "status": "ready", "reason": None, "install": None, "version": running.version,
            "command": list(running.command) or None, "model": running.model_name, "url": running.url,
            "device_pool_tokens": engine.device_pool_tokens(), "start_seconds": running.start_seconds})
        return engine

    def _measure(self, visit: Visit, engine: Engine) -> _VisitResult:
        """Measure a visit, repeating it while other load on the machine disturbs it, and record the faults of that."""
        result = self._measure_once(visit, engine, 0)
        retried: tuple[Fault, ...] = ()
        for attempt in range(1, 1 + self._experiment.retries):
            again = tuple(fault for fault in result.faults if fault.fatal and fault.transient)
            if not again or not _is_alive(engine):
                break
            retried += again
            result = self._measure_once(visit, engine, attempt)
        return replace(result, retried_faults=retried)

    def _measure_once(self, visit: Visit, engine: Engine, attempt: int) -> _VisitResult:
        # Each attempt has prompts that no earlier run had.
        repeat = visit.repeat + attempt * ATTEMPT_PROMPTS
        workload = self._experiment.workload(visit.workload, visit.arm)
        warmups = self._experiment.warmups
        if warmups:
            warmups = self._bench.load.warm_up(workload, engine.running, warmups)
            engine.check()
        cache_reset = engine.reset_cache()
        time.sleep(self._bench.settle_seconds)
        before = engine.counters()
        monitors = self._folder.monitor_file(visit)
        with self._bench.watch(engine, monitors) if self._bench.watch is not None else contextlib.nullcontext():
            measured = self._bench.load.measure(workload, engine.running, repeat, self._watcher.live())
        # If the server died it cannot be queried, and only the counters that the client read remain.
        counters = {**measured.run.counters, **_since(before, engine.counters()), **engine.gauges()}
        measured = replace(measured, run=replace(measured.run, counters=counters))
        pool = engine.device_pool_tokens()
        faults = judge(Sample(measured.run, warmups, self._experiment.metrics, measured.sharing, measured.working_set,
                              pool, workload.offload), self._experiment.gates)
        return _VisitResult(visit, measured, repeat, warmups, cache_reset, pool, monitors,
                            (*faults, *_cache_reset_faults(cache_reset)))

    def _visit_record(self, engine: Engine, result: _VisitResult) -> dict[str, Any]:
        running, measured = engine.running, result.measured
        limits = self._bench.limits_of(self._experiment.arm(result.visit.arm).spec)
        return {
            "status": "ok", "reason": None, "log_tail": None, "server_start_seconds": running.start_seconds,
            "metrics": {**measured.metrics, **_server_metrics(measured)},
            "window_metrics": dict(measured.window_metrics),
            "sources": _sources(measured), "counters": dict(measured.run.counters),
            "faults": [fault.to_json() for fault in result.faults],
            "client": measured.run.client.to_json(), "workload_stats": dict(measured.stats), "repeat": result.repeat,
            "limit": reached(measured.run, limits).to_json(),
            "retried_faults": [fault.to_json() for fault in result.retried_faults],
            "version": running.version, "command": list(running.command), "warmups": result.warmups,
            "cache_reset": result.cache_reset.how, "device_pool_tokens": result.pool,
            "start_unix": measured.run.start_unix, "duration": measured.run.duration,
            "details": dict(measured.run.details),
            "monitors": f"monitors/{result.monitors.name}" if result.monitors.exists() else None,
            "log": None if running.log_path is None else _inside(running.log_path, self._folder.path),
        }

    def _fail(self, visit: Visit, failure: EngineFailed, begun: float, result: _VisitResult | None = None) -> None:
        """Record that a run failed. `result`: the measurements so far, which are kept as they are."""
        key = visit.arm, visit.workload
        self._failures[key] = self._failures.get(key, 0) + 1
        self._end(visit, {"status": "failed", "reason": _why(failure), "cause": failure.cause,
                          "log_tail": failure.log_tail, "started": begun, "seconds": time.time() - begun,
                          "metrics": {}, "faults": []}, result)

    def _end(self, visit: Visit, record: Mapping[str, Any], result: _VisitResult | None = None) -> None:
        self._folder.write_visit(visit, record, None if result is None else result.measured.run)
        self._watcher.visit_ends(visit, record)

    def _close(self, arm: str) -> None:
        self._open.pop(arm).stop()

    def _close_all(self) -> None:
        with ExitStack() as stack:  # an engine that fails to stop must not prevent others from stopping
            for arm in list(self._open):
                stack.callback(self._close, arm)


def _is_alive(engine: Engine) -> bool:
    try:
        engine.check()
    except EngineFailed:
        return False
    return True


def _why(failure: EngineFailed) -> str:
    return f"{failure.cause}: {failure.reason}"


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items() if name in before}


def _cache_reset_faults(cache_reset: CacheReset) -> Iterator[Fault]:
    """Yield a fault if the cache could not be emptied; the gate on hits finds whether that mattered."""
    if not cache_reset.done:
        yield Fault("contamination", f"the prefix cache was not emptied before the run ({cache_reset.how}); every run "
                                     "has prompts of its own", fatal=False)


def _server_metrics(measured: Measured) -> dict[str, float]:
    """Return the server's metrics: mean phases of requests, the share of prompt tokens found in a cache, speculation
    and ranks."""
    metrics: dict[str, float] = {}
    timings = [record.timings for record in measured.run.completed if record.timings]
    for name in PHASES:
        values = [each[name] for each in timings if name in each]
        if values:
            metrics[f"{name}_ms"] = 1e3 * sum(values) / len(values)
    hits, prompt = cache_hits(measured.run)
    if hits is not None and prompt > 0:
        metrics["hit_rate"] = hits / prompt
    run = measured.run
    return metrics | speculation_metrics(run.counters) | rank_metrics(run.counters, run.duration)


def _sources(measured: Measured) -> dict[str, int] | None:
    sources = [record.sources for record in measured.run.completed if record.sources]
    names = dict.fromkeys(name for each in sources for name in each)
    return {name: sum(each.get(name, 0) for each in sources) for name in names} or None


def _inside(path: Path, folder: Path) -> str:
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path)
