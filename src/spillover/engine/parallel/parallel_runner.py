"""A runner for several ranks with the interface of any other: it sends every step to the other ranks, then runs it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from spillover.engine.batch.step_result import PromptObserver
from spillover.engine.loop import LaunchedStep, ModelRunner, StepRunner
from spillover.engine.parallel.messages import decode_rank_step, encode_rank_step
from spillover.engine.parallel.report import ONE, RanksReport
from spillover.engine.step import DraftItem, HeadDrafts, Step, StepResult
from spillover.engine.weights.placed import EngineWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.memory.transfer.transfers import Transfers
from spillover.models.layers import KVViews

Changed = TypeVar("Changed")


class OtherRanks(Protocol):
    """All ranks but rank 0."""

    weight_bytes: int

    def send(self, message: bytes) -> None:
        """Send a step to all of them."""

    def check(self) -> None:
        """Raise an error with the reason if one of them has exited."""

    def lost(self) -> Exception:
        """Return an error that says why a rank is lost."""

    def close(self) -> None: ...


class ParallelStep:
    """A step that all ranks compute."""

    def __init__(self, launched: LaunchedStep, others: OtherRanks, runner: ParallelRunner) -> None:
        self._launched = launched
        self._others = others
        self._runner = runner

    @property
    def step(self) -> Step:
        return self._launched.step

    def wait(self) -> None:
        self._wait(self._launched.wait)

    def done(self) -> bool:
        """Return True always: only `result` notices a lost rank, so callers have to wait there."""
        return True

    def result(self) -> StepResult:
        found = self._wait(self._launched.result)
        self._runner.check()  # a CUDA step also completes if another rank never joined it
        self._runner.running -= 1
        return found

    def _wait(self, wait: Callable[[], Changed]) -> Changed:
        self._runner.waiting_since = time.monotonic()
        try:
            return wait()
        except RuntimeError as error:  # raised by gloo because a connection was closed, or by the step itself
            self._others.check()
            lost = self._others.lost() if "gloo" in str(error).lower() else None
            raise lost or error from error
        finally:
            self._runner.waiting_since = None


class ParallelRunner:
    def __init__(self, inner: ModelRunner, others: OtherRanks, pools: Sequence[Tensor] = (),
                 lost_descriptor: int | None = None, report: Callable[[], RanksReport] = lambda: ONE,
                 on_close: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None) -> None:
        """Run steps on all ranks. `inner`: rank 0's runner. `pools`: the other ranks' KV pools as bytes, if rank 0 maps
        them. `lost_descriptor`: readable once a rank is lost. `check`: raises if ranks have not met in a step."""
        self.report = report
        self.inner = inner
        self.pools = pools
        self.lost_descriptor = lost_descriptor
        self._others = others
        self._on_close = on_close
        self._check = check
        self.running = 0  # number of steps whose results were not taken yet
        self.waiting_since: float | None = None  # monotonic time since when a step is waited for; None: no wait

    def launch(self, step: Step) -> ParallelStep:
        self._others.send(encode_rank_step(step, self.running))
        self.running += 1
        self.waiting_since = time.monotonic()  # capturing a CUDA graph waits for earlier steps
        try:
            return ParallelStep(self.inner.launch(step), self._others, self)
        finally:
            self.waiting_since = None

    def check(self) -> None:
        """Raise an error with the reason if a rank has exited, or if ranks have not met in a step."""
        self._others.check()
        self._check()

    @property
    def observe(self) -> PromptObserver | None:
        return self.inner.observe

    @observe.setter
    def observe(self, observe: PromptObserver | None) -> None:
        self.inner.observe = observe

    @property
    def drafting(self) -> StepRunner | None:
        return self.inner.drafting

    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        return self.inner.draft(items, wait=True)  # the next step must name the tokens for the other ranks

    @property
    def weights(self) -> EngineWeights:
        return self.inner.weights

    @property
    def kv(self) -> KVViews:
        return self.inner.kv

    @property
    def transfers(self) -> Transfers:
        return self.inner.transfers

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        return self.inner.in_order(change)

    def sleep(self, blocks: Sequence[int]) -> None:
        self.inner.sleep(blocks)

    def wake_up(self) -> None:
        self.inner.wake_up()

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights of all ranks."""
        return self.inner.weight_bytes + self._others.weight_bytes

    def weight_traffic(self) -> WeightTraffic:
        """Return the traffic of rank 0; every other rank has about the same."""
        return self.inner.weight_traffic()

    def close(self) -> None:
        try:
            self._others.close()
        finally:
            self.inner.close()
            self._on_close()


class Follower:
    """Runs the steps that rank 0 sends, in the process of another rank."""

    def __init__(self, runner: StepRunner, ahead: bool) -> None:
        """Make the follower. `ahead`: launch steps while earlier ones run, as many as rank 0; False: wait for each."""
        self._runner = runner
        self._ahead = ahead
        self._launched: deque[LaunchedStep] = deque()

    def launch(self, message: bytes) -> None:
        """Launch a step, after taking the results that rank 0 had taken when it sent the step."""
        step, running = decode_rank_step(message)
        self._take_results(running)
        self._launched.append(self._runner.launch(step))
        if not self._ahead:
            self._take_results(0)

    def _take_results(self, left: int) -> None:
        while len(self._launched) > left:
            self._launched.popleft().result()


def ranks_report(runner: StepRunner) -> RanksReport:
    """Return the report of a runner's ranks; ONE if there is only one rank."""
    return runner.report() if isinstance(runner, ParallelRunner) else ONE
