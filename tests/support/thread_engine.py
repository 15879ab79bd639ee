"""An engine whose ranks are threads: scheduler, tiers and steps of a sharded model, without processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from spillover import LLM
from spillover.engine import assemble
from spillover.engine.config import EngineConfig
from spillover.engine.loop import StepRunner
from spillover.engine.parallel.messages import STOP
from spillover.engine.parallel.parallel_runner import Follower, ParallelRunner
from spillover.engine.parallel.rank_plan import without_tiers
from spillover.engine.parallel.start import MakeRunner
from spillover.engine.planned import planned_rank
from spillover.plan.planner import Plan
from support.rank_threads import DEADLINE, ThreadRanks, thread_ranks


class RankThreads:
    """The other ranks, with the interface that ParallelRunner uses."""

    def __init__(self, config: EngineConfig, plan: Plan, ranks: list[ThreadRanks]) -> None:
        self.weight_bytes = 0
        self.runners: list[StepRunner] = []
        self.pools: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self._inboxes: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in ranks]
        for each in ranks:
            planned = planned_rank(config, without_tiers(plan), each.rank)
            self.runners.append(assemble.make_runner(planned, ranks=each, allocate=self._pool if plan.tiers else None))
            self.weight_bytes += self.runners[-1].weight_bytes
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(len(ranks))]
        for thread in self._threads:
            thread.start()

    def send(self, message: bytes) -> None:
        for inbox in self._inboxes:
            inbox.put(message)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def lost(self) -> Exception:
        return RuntimeError("a rank failed")

    def close(self) -> None:
        self.send(STOP)
        for thread in self._threads:
            thread.join(DEADLINE)
        for runner in self.runners:
            runner.close()
        self.check()

    def _run(self, index: int) -> None:
        try:
            follower = Follower(self.runners[index], ahead=False)
            while (message := self._inboxes[index].get()) != STOP:
                follower.launch(message)
        except BaseException as error:
            self._error = error

    def _pool(self, nbytes: int) -> torch.Tensor:
        self.pools.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.pools[-1]


def start_threads(config: EngineConfig, plan: Plan, make: MakeRunner) -> ParallelRunner:
    """Start ranks as threads, in place of `start_ranks`."""
    first, *rest = thread_ranks(config.tensor_parallel_size)
    others = RankThreads(config, plan, rest)
    inner: Any = make(ranks=first)
    return ParallelRunner(inner, others, others.pools)


@contextmanager
def threads_for_ranks() -> Iterator[None]:
    """Make engines start threads in place of processes."""
    with mock.patch.object(assemble, "start_ranks", start_threads):
        yield


@contextmanager
def thread_llm(model: str, **flags: Any) -> Iterator[LLM]:
    """Open an LLM whose ranks are threads."""
    with threads_for_ranks(), LLM(model, **flags) as llm:
        yield llm
