"""Measures for each step the host's time and the total time, by timing the calls of the engine's loop, without a
profiler that would slow them down."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from spillover.engine.loop import Engine, LaunchedStep
from spillover.engine.step import Step, StepResult

SCHEDULER, LAYOUT, LAUNCH, RESULTS, WAITING = "scheduler", "layout", "launch", "results", "waiting"
HOST_PARTS = (SCHEDULER, LAYOUT, LAUNCH, RESULTS, WAITING)


@dataclass
class HostStep:
    """The times of one step in seconds; the total starts at the previous step's end or at its own launch if later."""

    batch: tuple[tuple[int, int], ...]  # (new tokens, tokens cached before) of each request
    has_prefill: bool
    total_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.batch)


@contextlib.contextmanager
def host_clock(engine: Engine) -> Iterator[list[HostStep]]:
    """Time the steps that the engine, idle on entry, runs inside; the list is complete when it is idle again."""
    clock = _Clock()
    scheduler, runner = engine.scheduler, engine.runner
    timed: list[tuple[object, str, str]] = [
        *((scheduler, name, SCHEDULER) for name in ("schedule", "poll_transfers", "pop_ended", "observe_step")),
        (scheduler, "finish", RESULTS), (runner, "lay_out", LAYOUT)]
    wrapped: list[tuple[object, str, Callable[..., Any]]] = [
        *((owner, name, functools.partial(clock.timed, part, getattr(owner, name))) for owner, name, part in timed),
        (runner, "launch", functools.partial(clock.launch, runner.launch))]
    for owner, name, call in wrapped:
        setattr(owner, name, call)
    try:
        yield clock.steps
    finally:
        for owner, name, _ in wrapped:
            delattr(owner, name)  # uncovers the method of the class


class _Clock:
    def __init__(self) -> None:
        self.steps: list[HostStep] = []
        self._before: dict[str, float] = {}  # seconds by part already spent on the step that is launched next
        self._ended_step: HostStep | None = None  # the step that completed last
        self._ended = 0.0  # time at which that step completed

    def timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; add its time to the last completed step for RESULTS and WAITING, else to the next launch."""
        ended = self._ended_step if part in (RESULTS, WAITING) else None
        spent = self._before if ended is None else ended.seconds
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - start

    def launch(self, call: Callable[[Step], LaunchedStep], step: Step) -> LaunchedStep:
        start = time.perf_counter()
        launched = call(step)
        seconds, self._before = self._before, {}
        seconds[LAUNCH] = time.perf_counter() - start - seconds.get(LAYOUT, 0.0)
        timing = HostStep(tuple((item.count, item.start) for item in step.items), step.has_prefill, seconds=seconds)
        self.steps.append(timing)
        return _TimedStep(launched, timing, start, self)

    def result(self, launched: LaunchedStep, timing: HostStep, began: float) -> StepResult:
        before, self._ended_step = self._ended, timing
        self.timed(WAITING, launched.wait)
        self._ended = time.perf_counter()
        timing.total_seconds = self._ended - max(began, before)
        result: StepResult = self.timed(RESULTS, launched.result)
        return result


class _TimedStep:
    def __init__(self, launched: LaunchedStep, timing: HostStep, began: float, clock: _Clock) -> None:
        self.step = launched.step
        self._launched = launched
        self._timing = timing
        self._began = began
        self._clock = clock

    def wait(self) -> None:
        self._launched.wait()

    def done(self) -> bool:
        return self._launched.done()

    def result(self) -> StepResult:
        return self._clock.result(self._launched, self._timing, self._began)
