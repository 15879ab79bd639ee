"""Copies where the device is the CPU: on a thread of their own, ahead of need."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_queue import LinkQueue, Priority, Turn

RATE = 10e9  # bytes a second, until a copy was seen


class CpuCopy:
    """A copy on its way."""

    def __init__(self, turn: Turn, future: Future[None]) -> None:
        self.turn = turn
        self.future = future


class CpuTransfers:
    """A memory.transfer.transfers.Transfers. Computing is done when its call returns: no copy has to let it pass."""

    def __init__(self, pool: HostPool | None = None) -> None:
        self.pool = pool or HostPool()
        self.queue = LinkQueue(duplex=False, rate=RATE)
        self._thread = ThreadPoolExecutor(1, "spillover-copy")

    def start(self, target: Any, source: Any, priority: Priority, after: None = None) -> CpuCopy:
        def copy() -> None:
            target.copy_(source() if callable(source) else source)

        return self.submit(copy, target.nbytes, priority)

    def submit(self, work: Callable[[], None], nbytes: int, priority: Priority) -> CpuCopy:
        """Do work that moves `nbytes` in its turn, on the thread of copies."""
        turn = Turn(priority, nbytes)
        return CpuCopy(turn, self._thread.submit(self._run, work, turn))

    def wait(self, ticket: CpuCopy) -> None:
        """Wait for a copy. Copies are made in the order they were started in: one that nobody waits for any more may go
        to the same place."""
        self.queue.promote(ticket.turn, Priority.DEMAND)
        ticket.future.result()

    def mark(self) -> None:
        return None

    def close(self) -> None:
        self._thread.shutdown()
        self.pool.close()

    def _run(self, work: Callable[[], None], turn: Turn) -> None:
        with self.queue.turn(turn):
            work()
