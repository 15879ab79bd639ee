"""Rank 0's runner behind the face of any other: every step it is given goes to the other ranks first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from spillover.engine.batch.step_result import PromptObserver
from spillover.engine.loop import LaunchedStep, ModelRunner, StepRunner
from spillover.engine.parallel.messages import decode_turn, encode_turn
from spillover.engine.parallel.report import ONE, RanksReport
from spillover.engine.step import DraftItem, HeadDrafts, Step, StepResult
from spillover.engine.weights.placed import EngineWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.memory.transfer.transfers import Transfers
from spillover.models.layers import KVViews

Changed = TypeVar("Changed")


class OtherRanks(Protocol):
    """The ranks but the first."""

    weight_bytes: int

    def send(self, message: bytes) -> None:
        """Hand a step to all of them."""

    def check(self) -> None:
        """Raise what ended one of them, if one has ended."""

    def lost(self) -> Exception:
        """Return why a step failed that they were to compute together."""

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
        self._ended(self._launched.wait)

    def done(self) -> bool:
        """Return True: only who waits by `result` notices a rank that never comes."""
        return True

    def result(self) -> StepResult:
        found = self._ended(self._launched.result)
        self._runner.check()  # a CUDA step ends also where another rank never came
        self._runner.running -= 1
        return found

    def _ended(self, wait: Callable[[], Changed]) -> Changed:
        self._runner.waiting_since = time.monotonic()
        try:
            return wait()
        except RuntimeError as error:  # gloo's, of a connection that was closed; or the step's own
            self._others.check()
            lost = self._others.lost() if "gloo" in str(error).lower() else None
            raise lost or error from error
        finally:
            self._runner.waiting_since = None


class ParallelRunner:
    def __init__(self, inner: ModelRunner, others: OtherRanks, pools: Sequence[Tensor] = (),
                 lost_descriptor: int | None = None, report: Callable[[], RanksReport] = lambda: ONE,
                 on_close: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None) -> None:
        """Run steps on all ranks. `inner`: rank 0's. `pools`: bytes of the other ranks' KV, where rank 0 can reach it.
        `lost_descriptor`: readable once a rank is lost. `check`: raises if ranks have not met in a step."""
        self.report = report
        self.inner = inner
        self.pools = pools
        self.lost_descriptor = lost_descriptor
        self._others = others
        self._on_close = on_close
        self._check = check
        self.running = 0  # steps whose results were not taken yet
        self.waiting_since: float | None = None  # monotonic; None: nobody waits for a step

    def launch(self, step: Step) -> ParallelStep:
        self._others.send(encode_turn(step, self.running))
        self.running += 1
        self.waiting_since = time.monotonic()  # capturing a CUDA graph waits for the steps before
        try:
            return ParallelStep(self.inner.launch(step), self._others, self)
        finally:
            self.waiting_since = None

    def check(self) -> None:
        """Raise what ended a rank, if one has ended."""
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
        return self.inner.draft(items, wait=True)  # the other ranks are told them

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
        """Return the bytes of all ranks."""
        return self.inner.weight_bytes + self._others.weight_bytes

    def weight_traffic(self) -> WeightTraffic:
        """Return what rank 0 has moved; the others move as much."""
        return self.inner.weight_traffic()

    def close(self) -> None:
        try:
            self._others.close()
        finally:
            self.inner.close()
            self._on_close()


class Follower:
    """Runs what rank 0 sends, at another rank."""

    def __init__(self, runner: StepRunner, ahead: bool) -> None:
        """Follow rank 0. `ahead`: launch a step while earlier ones run, as many as at rank 0; else wait for each."""
        self._runner = runner
        self._ahead = ahead
        self._launched: deque[LaunchedStep] = deque()

    def take(self, message: bytes) -> None:
        """Launch a step. Results that rank 0 has taken by now are taken before."""
        step, running = decode_turn(message)
        self._take_results(running)
        self._launched.append(self._runner.launch(step))
        if not self._ahead:
            self._take_results(0)

    def _take_results(self, left: int) -> None:
        while len(self._launched) > left:
            self._launched.popleft().result()


def ranks_report(runner: StepRunner) -> RanksReport:
    """Return what a runner's ranks have done together; ONE where there is one."""
    return runner.report() if isinstance(runner, ParallelRunner) else ONE
