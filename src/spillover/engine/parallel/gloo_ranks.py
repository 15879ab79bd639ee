"""Ranks that communicate over gloo: processes of one machine whose tensors are in main memory.

A sum gathers the parts of all ranks and adds them in the order of ranks, so its bits depend on neither the batch nor
the message size; gloo's own ring would add pieces in different orders.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed import BroadcastOptions, GatherOptions, ProcessGroupGloo

from spillover.engine.parallel.report import RanksReport, expert_rows
from spillover.models.sharding.ranks import sum_in_order

MEETING_SECONDS = 60.0  # timeout of the meeting of all ranks in seconds, once all have started
# Timeout of a call in seconds. Ranks that die or hang are detected much earlier (rank_processes); this timeout is for
# ranks that compute endlessly.
CALL_SECONDS = 120.0


class GlooRanks:
    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """Meet the other ranks, which use the same folder."""
        self.rank = rank
        self.size = size
        self.expert_rows = torch.zeros(size, dtype=torch.int64)
        self.pools: list[Tensor] = []  # always empty: KV pools on a CPU are shared before ranks start
        self.calls = 0
        self.bytes = 0  # bytes that this rank has contributed to calls
        self.seconds = 0.0  # seconds spent in calls
        self.waiting_since: float | None = None  # monotonic time at which the current call began; None: no call runs
        store = FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=MEETING_SECONDS))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=CALL_SECONDS)
        self._group: Any = ProcessGroupGloo(PrefixStore("layers", store), rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._all_gather(x))

    def gather(self, x: Tensor) -> list[Tensor]:
        given = _bytes(x)
        parts = [torch.empty_like(given) for _ in range(self.size)] if self.rank == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([parts] if parts else [], [given], options), given.nbytes)
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def broadcast(self, x: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(self._group.broadcast([x], options), x.nbytes)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        given = _bytes(x)
        parts = [torch.empty_like(given) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [given]), given.nbytes)
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def stop(self) -> None:
        """Do nothing: calls raise once a rank has closed its connections."""

    def check(self) -> None:
        """Do nothing: failed calls raise by themselves."""

    def report(self) -> RanksReport:
        return RanksReport(self.size, self.calls, self.bytes, self.seconds, expert_rows(self.expert_rows))

    def _wait(self, work: torch.distributed.Work, nbytes: int) -> None:
        begun = self.waiting_since = time.monotonic()
        try:
            work.wait()
        finally:
            self.waiting_since = None
            self.calls, self.bytes = self.calls + 1, self.bytes + nbytes
            self.seconds += time.monotonic() - begun


def _bytes(x: Tensor) -> Tensor:
    """Return a tensor as bytes [n], which gloo moves whatever the tensor's type."""
    return x.contiguous().view(-1).view(torch.uint8)
