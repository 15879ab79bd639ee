"""The engine's loop: schedule, run, finish. Everything else in this room serves these three lines."""

from __future__ import annotations

from typing import Protocol

from spillover.engine.batch import Batch, StepResult
from spillover.engine.request import Request
from spillover.engine.scheduler import Scheduler


class LaunchedStep(Protocol):
    @property
    def batch(self) -> Batch: ...

    def result(self) -> StepResult: ...  # waits for the step


class StepRunner(Protocol):
    """What computes a step: `engine.runner` with a model, `engine.null_runner` without one."""

    def launch(self, batch: Batch) -> LaunchedStep: ...

    def sleep(self) -> None: ...  # weights to the host; no step is launched until wake_up

    def wake_up(self) -> None: ...

    @property
    def weight_bytes(self) -> int: ...

    def close(self) -> None: ...


class Engine:
    def __init__(self, scheduler: Scheduler, runner: StepRunner, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.num_steps = 0
        self.slots_held = 0  # token slots in running requests' blocks, summed over steps ...
        self.slots_wasted = 0  # ... and those of them without a token
        self._overlap = overlap
        self._launched: LaunchedStep | None = None

    def step(self) -> list[Request]:
        """One turn; returns the requests that have a new token or have ended.

        With overlap, step N+1 is scheduled and launched before the results of N are taken in.
        """
        batch = self.scheduler.schedule()
        launched = self.runner.launch(batch) if batch else None
        ended, self._launched = (self._launched, launched) if self._overlap else (launched, None)
        if launched is not None:
            self._count()
        return self.scheduler.finish(ended.batch, ended.result()) if ended is not None else []

    def settle(self) -> list[Request]:
        """Take in the step that still runs, and launch none; returns as `step` does."""
        ended, self._launched = self._launched, None
        return self.scheduler.finish(ended.batch, ended.result()) if ended is not None else []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._launched is not None

    def _count(self) -> None:
        held, used = self.scheduler.slots()
        self.num_steps += 1
        self.slots_held += held
        self.slots_wasted += held - used

    def close(self) -> None:
        """Wait for the launched step and stop the runner; requests still running are dropped."""
        if self._launched is not None:
            self._launched.result()
            self._launched = None
        self.runner.close()
