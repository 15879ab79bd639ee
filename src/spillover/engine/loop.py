"""The engine's loop: schedule, run, finish. The rest of this package serves these three steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from spillover.engine.batch.step_result import PromptObserver
from spillover.engine.events.publisher import NoStepEvents, StepEvents
from spillover.engine.requests.request import Request
from spillover.engine.scheduler import Scheduler
from spillover.engine.step import DraftItem, HeadDrafts, Step, StepResult
from spillover.engine.weights.placed import EngineWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.errors import SpilloverError
from spillover.memory.spill.restore_plan import ComputeCost
from spillover.memory.transfer.transfers import Transfers
from spillover.models.layers import KVViews

logger = logging.getLogger(__name__)

Changed = TypeVar("Changed")


class LaunchedStep(Protocol):
    @property
    def step(self) -> Step: ...

    def wait(self) -> None: ...  # blocks until the step has completed

    def done(self) -> bool: ...  # True if the step has completed, or if only `result` may wait for it

    def result(self) -> StepResult: ...  # waits for the step and returns its result


class StepRunner(Protocol):
    """The interface of runners, which compute steps: `CpuRunner`, `CudaRunner`, and `NullRunner` without a model."""

    def launch(self, step: Step) -> LaunchedStep: ...

    def sleep(self, blocks: Sequence[int]) -> None: ...  # moves weights and these KV blocks to the host until wake_up

    def wake_up(self) -> None: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def transfers(self) -> Transfers: ...

    def weight_traffic(self) -> WeightTraffic: ...

    def close(self) -> None: ...


class ModelRunner(StepRunner, Protocol):
    """A runner whose weights and KV are in device memory; a `NullRunner` has empty ones."""

    observe: PromptObserver | None

    @property
    def drafting(self) -> StepRunner | None:
        """Return the runner that drafts for this one with substitutes; None if there is none."""
        ...

    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        """Draft with the model's head, if it has one. `wait`: return the tokens themselves; without it they may stay on
        the device for the next step, which then refers to them as ON_DEVICE."""
        ...

    @property
    def weights(self) -> EngineWeights: ...

    @property
    def kv(self) -> KVViews: ...

    def in_order(self, change: Callable[[], Changed]) -> Changed: ...  # runs `change` after all steps launched so far


URGENT_POLL_SECONDS = 0.002  # seconds between two polls of copies while a prefill step runs
FLUSH_SECONDS = 10.0  # timeout in seconds, at close, for writing blocks to the tiers that outlive the process


class DraftingModel(Protocol):
    """A second model, which drafts for the runner's."""

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None: ...


class Engine:
    def __init__(self, scheduler: Scheduler, runner: StepRunner, overlap: bool = True,
                 drafting: DraftingModel | None = None, events: StepEvents | None = None) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.drafting = drafting
        self.events = events or NoStepEvents()
        self.on_step: Callable[[Step, float], None] | None = None  # called with every step and its seconds
        self.failed = False  # whether a step has raised; the requests scheduled for it will never finish
        self.num_steps = 0
        self.slots_held = 0  # token slots in running requests' blocks, summed over steps
        self.slots_wasted = 0  # token slots without a token in these blocks, summed over steps
        self.prefill_cost = ComputeCost(None)  # measured in this engine's steps
        self._overlap = overlap
        self._launched: LaunchedStep | None = None
        self._launched_at = 0.0  # monotonic time at which the step in flight was launched
        self._ended_at = 0.0  # monotonic time at which the last completed step did so

    def step(self) -> list[Request]:
        """Run one iteration and return the requests that have new tokens or have finished.

        With overlap, step N+1 is scheduled and launched before the result of step N is applied; or, if N+1 depends on
        that result, directly after it is applied and before this call returns.
        """
        launched, at = self._begin()
        if not self._overlap:
            return self._end(launched, at)
        ended, started, self._launched, self._launched_at = self._launched, self._launched_at, launched, at
        changed = self._end(ended, started)
        if launched is None and ended is not None:
            self._launched, self._launched_at = self._begin()
            changed += self.scheduler.pop_ended()
        return changed

    def drain(self) -> list[Request]:
        """Complete the step in flight without launching another; return the changed requests as `step` does."""
        ended, self._launched = self._launched, None
        return self._finish(ended, self._launched_at)

    def sleep(self) -> None:
        """Free device memory, keeping its contents on the host until `wake_up`. No step may be in flight."""
        kv, deadline = self.scheduler.kv, time.monotonic() + FLUSH_SECONDS
        while kv.num_in_flight and time.monotonic() < deadline:
            self.scheduler.connector.poll()
            self.wait(0.01)
        if kv.num_in_flight:
            raise SpilloverError("cannot sleep: copies of KV to or from a lower tier have not completed within "
                                 f"{FLUSH_SECONDS:g} s; check the disk and the remote store, and try again")
        if self.drafting is not None:
            self.drafting.sleep()
        self.runner.sleep(kv.used_blocks())

    def wake_up(self) -> None:
        self.runner.wake_up()
        if self.drafting is not None:
            self.drafting.wake_up()

    def wait(self, seconds: float) -> None:
        """Wait until a copy from another tier may have completed; called when a step had nothing to do."""
        self.scheduler.connector.wait(seconds)

    @property
    def has_copies_in_flight(self) -> bool:
        """Return whether a step is in flight, or blocks of the device are being copied."""
        return not self.failed and (self._launched is not None or self.scheduler.kv.num_in_flight > 0)

    @property
    def has_work(self) -> bool:
        return not self.failed and (self.scheduler.has_work or self._launched is not None)

    def _begin(self) -> tuple[LaunchedStep | None, float]:
        """Schedule and launch the next step, if there is one; return it with its launch time."""
        step = self.scheduler.schedule()
        now = time.monotonic()
        launched = self._launch(step) if step else None
        self.scheduler.poll_transfers(step)
        if launched is not None:
            self._count()
        return launched, now

    def _end(self, ended: LaunchedStep | None, started: float) -> list[Request]:
        changed = self.scheduler.pop_ended() + self._finish(ended, started)
        self.events.flush()
        return changed

    def _finish(self, ended: LaunchedStep | None, started: float) -> list[Request]:
        if ended is None:
            return []
        try:
            self._poll_urgent_spills(ended)
            result = ended.result()
        except Exception:
            self.failed = True
            raise
        now = time.monotonic()
        seconds = now - max(started, self._ended_at)
        self.prefill_cost.observe(ended.step.prefill_tokens, ended.step.num_tokens, seconds)
        self.scheduler.observe_step(ended.step, seconds)
        if self.on_step is not None:
            self.on_step(ended.step, seconds)
        self._ended_at = now
        return self.scheduler.finish(ended.step, result)

    def _poll_urgent_spills(self, running: LaunchedStep) -> None:
        """Poll the copies of KV that other engines may wait for while a prefill step runs: one poll may not start all
        of them, as a step may complete more blocks than host memory has free slots for."""
        connector = self.scheduler.connector
        while running.step.has_prefill and connector.has_urgent_spills and not running.done():
            connector.poll()
            connector.wait(URGENT_POLL_SECONDS)

    def _launch(self, step: Step) -> LaunchedStep:
        if self.failed:
            raise SpilloverError("the engine has failed in an earlier step, whose tokens are lost; start a new one")
        try:
            return self.runner.launch(step)
        except Exception:
            self.failed = True
            raise

    def _count(self) -> None:
        held, used = self.scheduler.slots()
        self.num_steps += 1
        self.slots_held += held
        self.slots_wasted += held - used

    def close(self) -> None:
        """Wait for the step in flight and stop the runner; requests still running are dropped."""
        launched, self._launched = self._launched, None
        try:
            if launched is not None:
                launched.result()
        except Exception as error:
            logger.warning("the last step failed, and its requests are dropped: %s", error)
        try:
            self.scheduler.connector.close(time.monotonic() + FLUSH_SECONDS)
        finally:
            self.events.close()
            if self.drafting is not None:
                self.drafting.close()
            self.runner.close()
