"""Copies of weights if the device is the CPU: made on a separate thread, before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link_queue import LinkQueue, Priority, QueuedCopy

RATE = 10e9  # assumed bytes per second until a copy has been measured


class CpuCopy:
    """The ticket of a copy in flight."""

    def __init__(self, copy: QueuedCopy, future: Future[None]) -> None:
        self.copy = copy
        self.future = future


class CpuTransfers:
    """A memory.transfer.transfers.Transfers. Kernels complete before their call returns, so no copy waits for them."""

    def __init__(self, pool: HostPool | None = None) -> None:
        self.pool = pool or HostPool()
        self.queue = LinkQueue(duplex=False, rate=RATE)
        self._thread = ThreadPoolExecutor(1, "spillover-copy")

    def start(self, target: Any, source: Any, priority: Priority, after: None = None) -> CpuCopy:
        def copy() -> None:
            target.copy_(source() if callable(source) else source)

        return self.submit(copy, target.nbytes, priority)

    def submit(self, work: Callable[[], None], nbytes: int, priority: Priority) -> CpuCopy:
        """Run work that copies `nbytes` on the copy thread, when the link queue admits it."""
        copy = QueuedCopy(priority, nbytes)
        return CpuCopy(copy, self._thread.submit(self._run, work, copy))

    def wait(self, ticket: CpuCopy) -> None:
        """Wait for a copy. Copies run in the order in which they were started, as an earlier one that is no longer
        waited for may have the same target."""
        self.queue.promote(ticket.copy, Priority.DEMAND)
        ticket.future.result()

    def record_event(self) -> None:
        return None

    def close(self) -> None:
        self._thread.shutdown()
        self.pool.close()

    def _run(self, work: Callable[[], None], copy: QueuedCopy) -> None:
        with self.queue.admit(copy):
            work()
