"""The host's share of a step's missing experts: its cores compute them while the device fetches the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from spillover.errors import SpilloverError
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.host_experts import HostExperts

MAX_STREAMED_TOKENS = 256  # tokens of the largest streaming step with a host share; more would take its cores too long


class HostShare:
    """The host's cores, the queue of requests that they answer, and the number of experts they are given."""

    def __init__(self, cores: HostExperts, queue: HostExpertQueue, split: Sequence[Tensor | None],
                 streamed: Callable[[int], float]) -> None:
        """Attach the cores to the queue. `split`: by layer, int32 [pairs + 1]: how many of n missing experts the host
        computes in a step that pages, None if it computes none. `streamed(rows)`: the fraction of missing experts that
        it computes in a step that streams. The queue has room for MAX_STREAMED_TOKENS."""
        cores.attach(queue)
        self.queue = queue
        self.split = split
        self._cores = cores
        self._streamed = streamed

    def streamed(self, rows: int) -> float:
        """Return the fraction of the missing experts that the host computes in a step of `rows` rows that streams."""
        return self._streamed(rows) if rows <= MAX_STREAMED_TOKENS else 0.0

    def wake(self) -> None:
        """Make the cores poll the queue: a step is about to be launched."""
        self._cores.wake()

    def check(self) -> None:
        """Raise if an answer of the host arrived too late for the device."""
        if self.queue.failed:
            raise SpilloverError("the host did not answer the device in time: experts that it was to compute are "
                                 "missing, and the step is lost; start again with --weights experts --policy lru, or "
                                 "give the process more cores")

    def close(self) -> None:
        self._cores.close()
